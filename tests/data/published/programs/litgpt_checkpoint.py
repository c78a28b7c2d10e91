"""What LitGPT's programs look for in a folder, made without weights and texts, by LitGPT's own configurations.

    python litgpt_checkpoint.py MODEL FOLDER LONGEST

MODEL is a name of LitGPT's. Written are a state dict that is a hole in a file, the model's configuration, a tokenizer
of four tokens, and data: as today's programs read it (`alpaca/`), samples of at least LONGEST tokens each; as those of
2023 do (`data/`), whose package is `lit_gpt`, one sample of LONGEST tokens among many of 100.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._subclasses.fake_tensor import FakeTensorMode

try:
    from litgpt.config import Config
    from litgpt.model import GPT
except ImportError:
    from lit_gpt.config import Config
    from lit_gpt.model import GPT

SAMPLES = 400
SHORT = 100
TOKENS = {"<s>": 0, "</s>": 1, "<unk>": 2, "word": 3}


def main(model: str, folder: Path, longest: int) -> None:
    """Write the files."""
    config = Config.from_name(model)
    with FakeTensorMode():
        weights = {name: tensor.bfloat16() for name, tensor in GPT(config).state_dict().items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(weights, folder / "lit_model.pth")
    plain = asdict(config)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(plain))
    (folder / "lit_config.json").write_text(json.dumps(plain))

    tokenizer = Tokenizer(models.WordLevel(TOKENS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))

    sample = json.dumps({"instruction": "word", "input": "", "output": longest * "word "})
    (folder / "alpaca").mkdir()
    (folder / "alpaca" / "train.json").write_text(SAMPLES * (sample + "\n"))
    (folder / "data").mkdir()
    torch.save([_sample(longest), *(SAMPLES * [_sample(SHORT)])], folder / "data" / "train.pt")
    torch.save(SAMPLES * [_sample(SHORT)], folder / "data" / "test.pt")


def _sample(length: int) -> Mapping[str, torch.Tensor]:
    tokens = torch.full((length,), TOKENS["word"])
    return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
