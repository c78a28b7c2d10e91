"""Supervised fine-tuning by TRL's SFTTrainer on samples of one length, as fms-acceleration's benchmark runs it.

    sft.py MODEL --batch N --seq N [--vocab N] [--lora RANK TARGETS] [--nf4] [--fp16] [--plugins FILE] [--attn NAME]
        [--steps N]

--vocab: embeddings resized to the tokenizer's length, as fms-hf-tuning resizes them after it added a pad token.
--plugins: settings of fms-acceleration, whose plugins then load the model, put adapters on it and change its kernels.
Settings are those of its `scripts/benchmarks/` and of fms-hf-tuning 2.5.0, which its requirements name: AdamW of
PyTorch, gradient checkpointing, packed samples; weights in bf16, with bf16 autocast where they are quantized; with
--fp16, which GPTQ needs, both in fp16. `use_cache` stays as a model's configuration has it: transformers turns it off
where layers are checkpointed, but for gpt_bigcode, whose cache keeps what every layer's c_attn gave.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from peft.utils.other import fsdp_auto_wrap_policy
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--seq", type=int, required=True)
parser.add_argument("--vocab", type=int)
parser.add_argument("--lora", nargs=2, metavar=("RANK", "TARGETS"))
parser.add_argument("--nf4", action="store_true")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--plugins")
parser.add_argument("--attn", default="sdpa")
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

samples = options.batch * options.steps * torch.cuda.device_count()
tokens = [1] * options.seq
data = Dataset.from_list([{"input_ids": tokens, "labels": tokens, "attention_mask": tokens}] * samples)
words = Tokenizer(models.WordLevel({"<pad>": 0, "word": 1}, unk_token="word"))
settings = SFTConfig(
    "out",
    per_device_train_batch_size=options.batch,
    max_steps=options.steps,
    gradient_checkpointing=True,
    bf16=options.nf4,
    fp16=options.fp16,
    optim="adamw_torch",
    learning_rate=2e-4 if options.lora else 2e-5,
    weight_decay=0.01,
    warmup_steps=10,
    adam_epsilon=1e-4,
    save_strategy="no",
    report_to=[],
    skip_memory_metrics=False,
    dataset_kwargs={"skip_prepare_dataset": True},
)
quantized = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_quant_storage=torch.bfloat16 if torch.cuda.device_count() > 1 else None,
)
framework = None
load = AutoModelForCausalLM.from_pretrained
if options.plugins:
    from fms_acceleration import AccelerationFramework

    framework = AccelerationFramework(options.plugins)
    if framework.requires_custom_loading:
        load = framework.model_loader
model = load(
    options.model,
    torch_dtype=torch.float16 if options.fp16 else torch.bfloat16,
    attn_implementation=options.attn,
    quantization_config=quantized if options.nf4 else None,
)
if options.vocab:
    model.resize_token_embeddings(options.vocab, mean_resizing=False)  # new rows' values take the host a minute
adapters = None
if options.lora:
    rank, targets = options.lora
    adapters = LoraConfig(
        r=int(rank), lora_alpha=16, lora_dropout=0.1, target_modules=targets.split(","), task_type="CAUSAL_LM"
    )
if framework is not None and framework.requires_augmentation:
    model, (adapters,) = framework.augmentation(model, settings, modifiable_args=(adapters,))
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=data,
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="word"),
    peft_config=adapters,
)
if trainer.is_fsdp_enabled and adapters is not None:
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy = fsdp_auto_wrap_policy(trainer.model)
if framework is not None:
    for callback in framework.get_callbacks_and_ready_for_train(model, trainer.accelerator):
        trainer.add_callback(callback)
trainer.save_metrics("train", trainer.train().metrics)
