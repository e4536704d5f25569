"""Prompts to token ids as vLLM's tokenizer makes them, sooner: fast tokenizers if equal, cached segments if exact.

``hasten`` puts this under a Hugging Face tokenizer as vLLM's renderer holds it (``vllm/renderers/hf.py``): calls with
one text and what vLLM asks for beside it (``TokenizeParams.get_encode_kwargs``) are answered here, all others, and what
is to be truncated, by the tokenizer as before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerBase, TokenizersBackend

from trivet.render.apart import is_apart
from trivet.render.compare import Finding, compare
from trivet.render.fast import CANDIDATES, NOT_INSTALLED, FastTokenizer, Limits, load
from trivet.render.hard_texts import hard_texts
from trivet.render.segments import CacheFigures, Rules, SegmentCache, Unsuitable
from trivet.render.spellings import spellings
from trivet.render.verdicts import Verdict, Verdicts

logger = logging.getLogger(__name__)

_MEANT = frozenset(("truncation", "max_length", "add_special_tokens"))
_PROBES = ("x", "", " x y", "\n")
_LOOKED_AT = 200
_OVERRIDDEN = ("__call__", "encode", "_encode_plus", "_call_one", "_batch_encode_plus")
"""A tokenizer with code of its own in one of these does more than the library under it."""


@dataclass(frozen=True, slots=True)
class TokenizingSettings:
    """How prompts are tokenized."""

    cache_bytes: int = 64 * 2**20
    """For ids of segments, in this process; 0 keeps none."""
    fast: Sequence[str] = tuple(CANDIDATES)
    """Fast tokenizers to be tried, the fastest that is shown to be equal is used; none leaves it to the reference."""
    named: str | None = None
    """The one of them that was asked for by name, if one was."""
    verdicts: Path | None = field(default_factory=lambda: _verdicts())
    """Where results of the comparison are kept, which takes seconds; None keeps none."""


def _left(limits: Limits) -> str:
    left = [f"one of {len(limits.unlike)} characters"] if limits.unlike else []
    left += ["a code point that means nothing"] if limits.meaningless else []
    left += [f"one of {len(limits.rows)} rows of characters"] if limits.rows else []
    return " or ".join(left)


def _verdicts() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trivet" / "tokenizers"


def settings_of(cache_mib: int, fast_tokenizer: str) -> TokenizingSettings:
    """The settings that a topology or command line names; see ``RenderTier``."""
    if fast_tokenizer == "auto":
        return TokenizingSettings(cache_mib * 2**20)
    if fast_tokenizer == "off":
        return TokenizingSettings(cache_mib * 2**20, ())
    return TokenizingSettings(cache_mib * 2**20, (fast_tokenizer,), fast_tokenizer)


class PromptTokenizer:
    """One tokenizer's ids. For several threads."""

    def __init__(self, tokenizer: TokenizersBackend, settings: TokenizingSettings) -> None:
        """Takes seconds, unless these were compared before.

        Raises:
            Unsuitable: it does what only it can do.
        """
        _is_plain(tokenizer)
        backend: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        definition = backend.to_str()
        if json.loads(definition)["model"].get("dropout"):
            raise Unsuitable("it merges at random (dropout)")
        self._ends = _ends(backend)
        self.fast, self.refused = self._choose(tokenizer, definition, settings)
        self.aside: str | None = None
        """Why it is not asked any more, or None."""
        self.uncut: str | None = None
        """Why segments are not kept, or None."""
        self._cache: SegmentCache | None = None
        quick = None if self.fast is None else (self.fast.takes, self.fast.ask)
        if settings.cache_bytes:
            try:
                self._cache = SegmentCache(Rules(definition), self._encode, settings.cache_bytes, quick)
                if self.fast is not None:
                    self.fast.left = self._cache.forget
            except Unsuitable as why:
                self.uncut = str(why)
        else:
            self.uncut = "turned off"

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """The ids of a text; None where only the tokenizer itself knows what it adds."""
        if self.aside is not None or (add_special_tokens and self._ends is None):
            return None
        ids = None if self._cache is None or is_apart() else self._cache.ids(text)
        if ids is None:
            ids = list(self._encode(text))
        if add_special_tokens and self._ends is not None:
            before, behind = self._ends
            ids = [*before, *ids, *behind] if before or behind else ids
        return ids

    def ids_of_parts(self, texts: Sequence[str]) -> list[list[int] | None]:
        """See ``SegmentCache``; nothing has ids of its own where texts cannot be cut."""
        cache = None if self.aside is not None else self._cache
        return [None] * len(texts) if cache is None else cache.ids_of_parts(texts)

    @property
    def generation(self) -> int:
        """Another one each time that ids made before are not to be trusted any more."""
        return 0 if self._cache is None else self._cache.generation

    def leave(self, why: str) -> None:
        """Has the tokenizer itself do it from now on, as it is not what it was."""
        self.aside = why
        if self._cache is not None:
            self._cache.forget()
        logger.warning("prompts are tokenized as vLLM does it from now on: %s", why)

    @property
    def figures(self) -> CacheFigures | None:
        """Of the cached segments; None where there are none."""
        return None if self._cache is None else self._cache.figures

    def told(self) -> dict[str, str]:
        """How prompts are tokenized, for people: what, and how that is."""
        if self.aside is not None:
            return {"tokenizer": f"vLLM's own: {self.aside}", "segments": "not kept"}
        fast = self.fast
        told = {"tokenizer": "tokenizers" if fast is None or fast.distrust else fast.name}
        if fast is not None and fast.limits != Limits():
            told["tokenizer"] += f"; texts with {_left(fast.limits)} are left to tokenizers"
        refused = dict(self.refused) | ({fast.name: f"gave {fast.distrust}"} if fast and fast.distrust else {})
        if refused:
            told["not used"] = "; ".join(f"{name} {why}" for name, why in refused.items())
        told["segments"] = f"not kept: {self.uncut}" if self.uncut else "kept"
        return told

    def _encode(self, text: str) -> Sequence[int]:
        return self._reference((text,))[0] if self.fast is None else self.fast(text)

    def _reference(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _choose(
        self, tokenizer: TokenizersBackend, definition: str, settings: TokenizingSettings
    ) -> tuple[FastTokenizer | None, Mapping[str, str]]:
        """
        Raises:
            Unsuitable: the tokenizer is not what the library under it is.
        """
        name = _fingerprint(tokenizer, definition, settings)
        kept = None if settings.verdicts is None else Verdicts(settings.verdicts)
        found = None if kept is None else kept.read(name)
        if found is None and kept is not None:
            with kept.alone(name):  # several workers start at once
                found = kept.read(name)
                if found is None:
                    found = self._find(tokenizer, definition, settings)
                    if found.finding.lasts:
                        kept.write(name, found)
        found = found or self._find(tokenizer, definition, settings)
        if found.unsuitable is not None:
            raise Unsuitable(found.unsuitable)
        fast, refused = found.finding.fast, found.finding.refused
        if fast is None:
            return None, refused
        spelling = found.finding.spelling
        encode = load(fast, spellings(definition)[spelling])
        if isinstance(encode, str):
            return None, {**refused, fast: encode}
        marks = [token["content"] for token in json.loads(definition)["added_tokens"]]
        return FastTokenizer(fast, encode, self._reference, found.finding.limits, spelling, marks), refused

    def _find(self, tokenizer: TokenizersBackend, definition: str, settings: TokenizingSettings) -> Verdict:
        unsuitable = self._disagreement(tokenizer, definition)
        if unsuitable or not settings.fast:
            return Verdict(unsuitable, Finding())
        logger.info("comparing fast tokenizers for this model (once, some 10 s) ...")
        return Verdict(None, compare(definition, settings.fast))

    def _disagreement(self, tokenizer: TokenizersBackend, definition: str) -> str | None:
        """That a tokenizer gives other ids than the library under it, or None."""
        texts = list(hard_texts([token["content"] for token in json.loads(definition)["added_tokens"]]))
        some = [*_PROBES, *texts[:: max(1, len(texts) // _LOOKED_AT)]]
        for text, ids in zip(some, self._reference(some), strict=True):
            if list(tokenizer(text, add_special_tokens=False)["input_ids"]) != ids:
                return "it gives other ids than the library under it"
        return None


def hasten(tokenizer: Any, settings: TokenizingSettings) -> PromptTokenizer | str:
    """Makes a renderer's tokenizer answer from here, in place; or says why it is left as it is."""
    if not isinstance(tokenizer, TokenizersBackend):
        return "it is no tokenizer of the `tokenizers` library"
    try:
        prompts = PromptTokenizer(tokenizer, settings)
    except Unsuitable as why:
        if settings.named or isinstance(why, _Replaced):
            logger.warning("no fast tokenizer: %s", why)
        return str(why)
    if settings.named is not None and prompts.fast is None:
        logger.warning("%s is asked for and not used: it %s", settings.named, _mended(prompts, settings.named))
    own = type(tokenizer)
    types = "token_type_ids" in tokenizer.model_input_names

    def answer(text: Any, wanted: Mapping[str, Any]) -> list[int] | None:
        if type(text) is not str or not wanted.keys() <= _MEANT:
            return None
        ids = prompts.ids(text, add_special_tokens=wanted.get("add_special_tokens", True))
        if wanted.get("truncation") and wanted.get("max_length") is None:
            return None  # a length of its own, which it may tell
        most = wanted.get("max_length") if wanted.get("truncation") else None
        return None if ids is None or (most is not None and len(ids) > most) else ids

    def call(self: Any, text: Any = None, *others: Any, **wanted: Any) -> Any:
        if others or (ids := answer(text, wanted)) is None:
            return own.__call__(self, text, *others, **wanted)
        more = {"token_type_ids": [0] * len(ids)} if types else {}
        return BatchEncoding({"input_ids": ids, **more, "attention_mask": [1] * len(ids)})

    def encode(self: Any, text: Any, *others: Any, **wanted: Any) -> Any:
        if others or (ids := answer(text, wanted)) is None:
            return own.encode(self, text, *others, **wanted)
        return ids

    def add_tokens(self: Any, *tokens: Any, **more: Any) -> int:
        added: int = own._add_tokens(self, *tokens, **more)  # by which ``add_tokens`` and ``add_special_tokens`` do it
        if added:  # processors of some models do so, when they are made
            prompts.leave("tokens were added to it")
        return added

    answers = {"__call__": call, "encode": encode, "_add_tokens": add_tokens}
    tokenizer.__class__ = type(f"Hastened{own.__name__}", (own,), answers)
    return prompts


class _Replaced(Unsuitable):
    pass


_REPLACED = (
    "another tokenizer has been put in its place already (VLLM_USE_FASTOKENS=1 does so): it is not compared, and no "
    "segments are kept"
)


def _mended(prompts: PromptTokenizer, name: str) -> str:
    why = prompts.refused.get(name, "was refused")
    mend = f"pip install {name}" if why == NOT_INSTALLED else "fast_tokenizer: auto takes another, where there is one"
    return f"{why} -> {mend}"


def _is_plain(tokenizer: TokenizersBackend) -> None:
    """
    Raises:
        Unsuitable: more than the library under it is at work.
    """
    if type(tokenizer.backend_tokenizer) is not Tokenizer:
        raise _Replaced(_REPLACED)
    if tokenizer.split_special_tokens or tokenizer.backend_tokenizer.encode_special_tokens:
        raise Unsuitable("it splits special tokens")
    for name in _OVERRIDDEN:
        kinds = (kind for kind in type(tokenizer).__mro__ if name in vars(kind))
        owner = next((kind for kind in kinds if not kind.__module__.startswith("vllm.")), None)
        if owner not in (TokenizersBackend, PreTrainedTokenizerBase, None):
            raise Unsuitable(f"{owner.__name__} has a way of its own ({name})")


def _ends(backend: Tokenizer) -> tuple[list[int], list[int]] | None:
    """What is added before and behind a text's ids; None if that is not the same for all texts."""
    found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for text in _PROBES:
        bare, whole = (backend.encode(text, add_special_tokens=add).ids for add in (False, True))
        more = len(whole) - len(bare)
        places = [place for place in range(more + 1) if whole[place : place + len(bare)] == bare]
        if not bare:
            continue
        if len(places) != 1:
            return None
        (place,) = places
        found.add((tuple(whole[:place]), tuple(whole[place + len(bare) :])))
    if len(found) != 1:
        return None
    ((before, behind),) = found
    if backend.encode("", add_special_tokens=True).ids != [*before, *behind]:
        return None
    return list(before), list(behind)


def _fingerprint(tokenizer: TokenizersBackend, definition: str, settings: TokenizingSettings) -> str:
    versions = {name: metadata.version(name) for name in ("tokenizers", "transformers")}
    versions |= {"unicode": unicodedata.unidata_version, "machine": platform.machine()}
    versions |= {"kind": " ".join(kind.__qualname__ for kind in type(tokenizer).__mro__)}
    for name in settings.fast:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    own = (
        Path(__file__).parent / name
        for name in ("compare.py", "fast.py", "hard_texts.py", "kinds.py", "spellings.py", "tokenizing.py")
    )
    digest = hashlib.sha256(json.dumps(versions).encode())
    for part in (definition.encode(), *(path.read_bytes() for path in own)):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]
