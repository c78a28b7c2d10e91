"""Trainings of Hugging Face's guide "Efficient Training on a Single GPU": guide.py MODEL EXPERIMENT.

512 made-up sequences of 512 tokens, a classifier, a Trainer with its defaults of that time; an experiment is a setting
and, behind a plus, an optimizer. Two things are done as PyTorch 1.10 did them, with which the guide's figures were
made: a softmax keeps its input for the derivative (until 1.10), gradients stay as zeros (until 1.13).
"""

import random
import sys

import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_pt_utils import get_parameter_names

SETTINGS = {
    "vanilla": {"per_device_train_batch_size": 4},
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "fp16": {"per_device_train_batch_size": 4, "fp16": True},
}
SETTINGS["checkpointed"] = {**SETTINGS["accumulated"], "gradient_checkpointing": True}
SETTINGS["all"] = {**SETTINGS["checkpointed"], "fp16": True}


class Softmax(torch.autograd.Function):
    """`torch.nn.functional.softmax` over the last dimension, whose derivative is given the input too."""

    @staticmethod
    def forward(context, scores):
        scores = scores.float()
        result = torch.softmax(scores, -1)
        context.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(context, gradient):
        _, result = context.saved_tensors
        return torch._softmax_backward_data(gradient, result, -1, result.dtype)


def eight_bit(model, arguments):
    """Adam with states in eight bits, of the parameters that decay and of the others."""
    import bitsandbytes

    decaying = {name for name in get_parameter_names(model, [torch.nn.LayerNorm]) if "bias" not in name}
    groups = [
        {"params": [value for name, value in model.named_parameters() if (name in decaying) == decays]}
        for decays in (True, False)
    ]
    return bitsandbytes.optim.Adam8bit(groups, lr=arguments.learning_rate)


def main(path, experiment):
    """Train, as the experiment says."""
    setting, _, optimizer = experiment.partition("+")
    torch.ones((1, 1)).to("cuda")
    torch.nn.functional.softmax = lambda scores, dim: Softmax.apply(scores)
    model = AutoModelForSequenceClassification.from_pretrained(path).to("cuda")
    clear = model.zero_grad
    model.zero_grad = lambda set_to_none=False: clear(set_to_none)
    texts = [{"input_ids": [random.randint(100, 29999) for _ in range(512)], "labels": 0} for _ in range(512)]
    chosen = {"optim": "adafactor"} if optimizer == "adafactor" else {}
    arguments = TrainingArguments("out", num_train_epochs=1, report_to="none", **SETTINGS[setting], **chosen)
    own = {"optimizers": (eight_bit(model, arguments), None)} if optimizer == "adam8bit" else {}
    Trainer(model=model, args=arguments, train_dataset=texts, **own).train()


main(*sys.argv[1:])
