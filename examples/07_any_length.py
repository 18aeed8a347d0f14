"""Search texts of all lengths by meaning, with one program for any length.

Example 01 pads every text to one length, and computes the padding, too. Here each text is embedded
at its own length, as in a service that embeds texts as they arrive.

It shows that the first text compiles a program for its length, the second one a program for any
length, and the other texts little or nothing. The results are the same as in eager PyTorch.

    python examples/07_any_length.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from minilm import CORPUS, SentenceEncoder, load_tokenizer
from tvmify import tvmify

QUESTIONS = (
    "Who won the race?",
    "How do bees find flowers?",
    "What did people in the countryside think would happen after so many weeks without rain?",
)


def passages(sentences: list[str], longest: int) -> list[str]:
    """Cut the corpus into texts of one, two, … `longest` sentences, then of one again."""
    texts, start, length = [], 0, 1
    while start < len(sentences):
        texts.append(" ".join(sentences[start : start + length]))
        start += length
        length = length % longest + 1
    return texts


@torch.inference_mode()
def main() -> None:
    """Embed all texts one by one, compiled and in eager; compare, and count programs."""
    parser = argparse.ArgumentParser(description="Search texts of all lengths.")
    parser.add_argument("--longest", type=int, default=6, help="sentences in the longest text")
    arguments = parser.parse_args()

    tokenizer = load_tokenizer()
    eager = SentenceEncoder().eval()
    # Compiled code is used without comparing its time with eager's, so that the counts are always
    # the same.
    fast = tvmify(eager, compare=False)

    def embed(model: nn.Module, texts: list[str]) -> Tensor:
        rows = []
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt")
            rows.append(model(tokens["input_ids"], tokens["attention_mask"]))
        return torch.cat(rows)

    texts = passages(CORPUS, arguments.longest)
    lengths = [len(tokenizer(text)["input_ids"]) for text in [*texts, *QUESTIONS]]
    found = embed(fast, list(QUESTIONS)) @ embed(fast, texts).T
    expected = embed(eager, list(QUESTIONS)) @ embed(eager, texts).T
    best = found.argmax(-1)
    assert best.equal(expected.argmax(-1)), "other texts than eager"
    for question, index in zip(QUESTIONS, best.tolist(), strict=True):
        print(f"{question}\n    {texts[index]}")

    for name, model in (("tvmify", fast), ("eager", eager)):
        start = time.perf_counter()
        embed(model, texts)
        print(f"{name}: {(time.perf_counter() - start) * 1e3 / len(texts):.1f} ms for each text")
    info = fast.cache_info()
    print(
        f"{len(lengths)} texts of {len(set(lengths))} lengths, {min(lengths)} to {max(lengths)} "
        f"tokens: {info.builds} programs, {info.eager} calls in eager."
    )


if __name__ == "__main__":
    main()
