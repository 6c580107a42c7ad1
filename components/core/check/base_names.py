"""Whether an adapter was trained on the model that is to serve it, as far as the two names tell.

Names prove nothing: copies, quantised siblings and local paths are normal, so that everything here is a warning. What
the trainer's machine calls its folders is nobody's business and never shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from components.core.adapter_files import CONFIG_NAME
from components.core.errors import printable
from components.core.findings import Finding

SUBJECT = "base_model_name_or_path"

# A Hub id as huggingface_hub checks it (utils/_validators.py): an owner at most, and no other characters than these.
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_CACHED = "models--"
_PART_OF_AN_ID = re.compile(r"[\w.-]+", re.ASCII)
_QUANTISED = re.compile(
    r"[-_.](?:(?:unsloth-)?bnb-[48]-?bit|[48]-?bits?|awq|gptq|autoround|hqq|exl2|gguf|quantized|int[48]|fp8|fp4|nvfp4|mxfp4"
    r"|w\d+a\d+|g\d+|dynamic|marlin|q[48](?:_[01k](?:_[sml])?)?)(?=$|[-_.])"
)
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])")
_FAMILY = re.compile(r"[a-z]+")


def base_findings(trained_on: object, base: str | None) -> Iterator[Finding]:
    """What to say of the base an adapter names.

    Args:
        trained_on: `base_model_name_or_path` of its config.
        base: the model that is to serve it, as the stack file names it; None if nobody says.
    """
    if not isinstance(trained_on, str) or not trained_on.strip() or base is None:
        return
    trained, served = _hub_id(trained_on), _hub_id(base)
    if trained is None:
        # Where both are paths on different machines, their names say nothing.
        if served is not None and _last(trained_on) != _last(served):
            yield _warning(
                "local-base",
                "no model of the Hub but, it seems, a local path of the machine it was trained on, which does not say "
                f"which model that was; make sure that it is {printable(served, limit=100)}.",
            )
        return
    if served is None:
        if _last(trained) != _last(base) and _plain(_last(trained)) not in _plain(_last(base)):
            yield _warning("wrong-base", f"is {_shown(trained)}, and it is to be served by {_shown(base)}, {_CHECK}.")
        return
    if trained.lower() == served.lower():
        return
    if _last(trained) == _last(served):
        yield _warning("other-owner", f"is {_shown(trained)}, {_shown(served)} of another owner; {_CHECK}.")
    elif _unquantised(_last(trained)) == _unquantised(_last(served)):
        yield _warning(
            "quantised-sibling",
            f"is {_shown(trained)}, another quantisation of {_shown(served)}: such adapters usually serve well, with "
            "slightly other answers than in training.",
        )
    else:
        yield _warning(
            "wrong-base",
            f"is {_shown(trained)}, {_difference(trained, served)} {_shown(served)} that is to serve it; {_CHECK}.",
        )


_CHECK = "make sure that both are the same model"


def _warning(rule: str, message: str) -> Finding:
    return Finding(CONFIG_NAME, "warning", rule, SUBJECT, message)


def _hub_id(name: str) -> str | None:
    """`owner/model` or `model`, also out of a path into a Hub cache; None for another path."""
    # No expression for the whole folder: one with two repeats takes the square, or the cube, of a name's length.
    for folder in name.replace("\\", "/").split("/"):
        if folder.startswith(_CACHED):
            owner, _, model = folder.removeprefix(_CACHED).partition("--")
            if _PART_OF_AN_ID.fullmatch(owner) and _PART_OF_AN_ID.fullmatch(model):
                return f"{owner}/{model}"
    name = name.strip().rstrip("/")
    return name if _HUB_ID.fullmatch(name) else None


def _shown(name: str) -> str:
    return printable(name, limit=100)


def _last(name: str) -> str:
    """The model's own name, without owner or folders; `meta-llama/Meta-Llama-3-8B` is `llama-3-8b`."""
    last = re.split(r"[/\\]", name.strip().rstrip("/\\"))[-1].lower()
    return last.removeprefix("meta-")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name)


def _unquantised(name: str) -> str:
    return _QUANTISED.sub("", name)


def _difference(trained: str, served: str) -> str:
    """What the names say about the two models, as `the … of`."""
    sizes = [set(_SIZE.findall(_last(name))) for name in (trained, served)]
    families = [_FAMILY.match(_last(name)) for name in (trained, served)]
    if families[0] and families[1] and families[0][0] != families[1][0]:
        return "by its name of another family than"
    if all(sizes) and sizes[0] != sizes[1]:
        return "by its name of another size than"
    return "and not"
