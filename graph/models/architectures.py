"""Which class of transformers a configuration stands for, and the facts of a model that every answer shows.

The class is the one that `architectures` in the configuration names, whatever it is. Only where a case asks for a head
of its own, or the configuration names no class, is another one taken, and that is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.case import Case
from graph.errors import CaptureError
from graph.loop.inputs import DTYPES
from graph.model import ModelFacts
from traces.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: The class of transformers that picks a model by its configuration, for each head.
_AUTO: Final[Mapping[str, str]] = {
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
}
#: ... and the table in transformers.models.auto.modeling_auto that it reads.
_TABLES: Final[Mapping[str, str]] = {
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is built: `kind` of `config`. `head` is a `graph.case.Head`, or "" for a class that has none of
    them; `named` the class that the configuration names, where it is another one, and `note` says so."""

    kind: Any
    config: Any
    head: str
    named: str = ""
    note: str = ""


def architecture(case: Case, config: PreTrainedConfig, place: str) -> Architecture:
    """The class that a case and its configuration (of transformers) stand for; `place` is where that stands.

    Raises ConfigError where `architectures` names a class that transformers does not have or that is of another
    configuration, CaptureError where transformers has no class for the head.
    """
    named = next(iter(getattr(config, "architectures", None) or []), "")
    if named and not case.head:
        return _named(str(named), config, place)
    head = case.head or _usual(config)
    kind = _of_head(head, config, place)
    if kind.__name__ == named:
        return Architecture(kind, config, head)
    names = f"names {named}, and head {head!r}" if named else "names no class (key 'architectures'), and the usual one"
    return Architecture(kind, config, head, str(named), f"{place} {names} builds {kind.__name__}")


def _named(name: str, config: PreTrainedConfig, place: str) -> Architecture:
    library = transformers()
    kind = getattr(library, name, None) if name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, library.PreTrainedModel):
        raise ConfigError(
            f"{place}: key 'architectures' names {name[:80]!r}, a class that transformers {library.__version__} does "
            "not have; --head builds another class of the same configuration, module:function a model of your own"
        )
    wanted: Any = kind.config_class  # type: ignore[attr-defined]
    for part in (config, config.get_text_config()):
        if wanted is not None and isinstance(part, wanted):
            return Architecture(kind, part, _head(name, part))
    raise ConfigError(
        f"{place}: key 'architectures' names {name}, which has a {getattr(wanted, '__name__', 'configuration')}, but "
        f"'model_type' is {config.model_type!r}"
    )


def _head(name: str, config: PreTrainedConfig) -> str:
    """The head of the class of this name; "" if it has none of ours."""
    return next((head for head, table in _tables() if table.get(config.model_type) == name), "")


def _usual(config: PreTrainedConfig) -> str:
    """The head that an architecture usually has."""
    for head, table in _tables():
        decoder = head == "masked-lm" and getattr(config, "is_decoder", False)
        if config.model_type in table and not decoder:
            return head
    return "causal-lm"


def _tables() -> Iterable[tuple[str, Mapping[str, Any]]]:
    from transformers.models.auto import modeling_auto

    return ((head, getattr(modeling_auto, name)) for head, name in _TABLES.items())


def _of_head(head: str, config: PreTrainedConfig, place: str) -> Any:
    mapping = getattr(transformers(), _AUTO[head])._model_mapping
    if type(config) not in mapping:
        raise CaptureError(f"{place}: transformers has no {head} of {config.model_type}; choose another 'head'")
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple | list) else found


def facts(module: torch.nn.Module, chosen: str = "", named: str = "") -> ModelFacts:
    """What `module` is: `chosen` for its dtype where it is quantized later on, `named` as in `Architecture`."""
    counted: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        counted[parameter.dtype] = counted.get(parameter.dtype, 0) + parameter.numel()
    common = max(counted, key=lambda dtype: counted[dtype], default=torch.float32)
    short = {dtype: name for name, dtype in DTYPES.items()}
    return ModelFacts(
        name=type(module).__name__,
        parameters=sum(counted.values()),
        trained=trained(module),
        dtype=chosen or short.get(common, str(common).removeprefix("torch.")),
        named=named,
    )


def trained(module: torch.nn.Module) -> int:
    """How many parameters are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def transformers() -> Any:
    """transformers, without its notes and without the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"transformers is needed to build models ({error}); pip install 'vramsim[torch]'") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers
