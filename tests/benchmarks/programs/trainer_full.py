"""Full fine-tuning with the Hugging Face Trainer: bf16, gradient checkpointing, AdamW, three steps."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

FOLDER = Path(__file__).parent / (sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b")
SEQUENCE = 2048


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 128256, (SEQUENCE,))
        return {"input_ids": tokens, "labels": tokens}


with tempfile.TemporaryDirectory() as output:
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16),
        args=TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=1,
            max_steps=3,
            bf16=True,
            gradient_checkpointing=True,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Tokens(),
    ).train()
print(f"{torch.cuda.max_memory_reserved()} bytes reserved")
