"""Search sentences by meaning, with the real all-MiniLM-L6-v2 (a BERT of six layers).

It shows that the first call with a shape compiles, the next ones do not, another process compiles
nothing at all, and the neighbours found are the same as in eager PyTorch.

    python examples/01_sentence_search.py
    python examples/01_sentence_search.py "Why does bread rise?"
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from minilm import CORPUS, SentenceEncoder, load_tokenizer
from stopwatch import medians, timed
from tvmify import tvmify

QUESTION = "How do plants make their food?"
TOKENS = 32  # every text is padded to this length, so that all queries have one shape
NEIGHBOURS = 5


@torch.inference_mode()
def main() -> None:
    """Embed the corpus and the question, compiled and in eager; compare, and print the results."""
    parser = argparse.ArgumentParser(description="Search sentences by meaning.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--rounds", type=int, default=15, help="how often each call is timed")
    arguments = parser.parse_args()

    tokenizer = load_tokenizer()

    def tokens(texts: list[str]) -> tuple[Tensor, Tensor]:
        padded = tokenizer(
            texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        return padded["input_ids"], padded["attention_mask"]

    eager = SentenceEncoder().eval()
    fast = tvmify(eager, target="llvm")  # shares the weights; `eager` stays as it is

    corpus, question = tokens(CORPUS), tokens([arguments.question])
    sentences, corpus_first = timed(lambda: fast(*corpus))
    query, query_first = timed(lambda: fast(*question))
    scores, eager_scores = query @ sentences.T, eager(*question) @ eager(*corpus).T

    best = scores.topk(NEIGHBOURS)
    assert best.indices.equal(eager_scores.topk(NEIGHBOURS).indices), "other neighbours than eager"

    console = Console()
    found = Table(title=arguments.question, title_justify="left", show_header=False, box=None)
    for score, index in zip(best.values[0].tolist(), best.indices[0].tolist(), strict=True):
        found.add_row(f"{score:.3f}", CORPUS[index])
    console.print(found)
    difference = (scores - eager_scores).abs().max().item()
    console.print(
        f"The same {NEIGHBOURS} neighbours as eager; scores differ by at most {difference:.1e}.\n"
    )

    times = Table("milliseconds", "first call", "later calls", "eager PyTorch", box=None)
    for name, inputs, first in (
        (f"{len(CORPUS)} sentences", corpus, corpus_first),
        ("1 question", question, query_first),
    ):
        later, in_eager = medians(
            lambda inputs=inputs: fast(*inputs),
            lambda inputs=inputs: eager(*inputs),
            rounds=arguments.rounds,
        )
        times.add_row(name, f"{first:.1f}", f"{later:.1f}", f"{in_eager:.1f}")
    console.print(times)

    info = fast.cache_info()
    if info.builds:
        console.print(
            f"\nCompiled {info.builds} programs in {sum(info.seconds.values()):.1f} s. "
            "Run this again: nothing will be compiled."
        )
    elif info.disk_hits:
        console.print(f"\nCompiled nothing: {info.disk_hits} programs came from the disk cache.")
    else:
        print(fast.explain())  # nothing could be compiled on this machine: print why


if __name__ == "__main__":
    main()
