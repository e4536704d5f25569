"""Whether a model that is no folder can be had, asked once before vLLM asks.

vLLM asks the Hugging Face hub for one file after another and tries each of them six times: a misspelt name, or a
machine without a way to the hub, took a minute and a half to be told, in words about something else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trivet.errors import TrivetError

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_KNOWN_BY = ("config.json", "params.json")
"""One of these is what a model's folder or repository is known by; the second is Mistral's."""
_TIMEOUT_S = 10.0
_MEND = (
    "give a model's folder, or a hub name that this machine can reach; simulated engines need neither with "
    "gateway: {plane: text}"
)


def look_for(name: str, revision: str | None = None) -> None:
    """Asks the hub for a model that is neither a folder nor in the cache. Blocks, for some seconds at most.

    What is not asked of this hub (an URL, a GGUF file, ModelScope, an offline machine) is left to vLLM.

    Raises:
        TrivetError: there is no such model, or the hub cannot be reached.
    """
    if Path(name).exists() or not _REPOSITORY.fullmatch(name) or os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:  # vLLM says what is missing at once
        return
    if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _KNOWN_BY):
        return
    try:
        HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise TrivetError(
            f"there is no folder {name!r} here, and no such model at {constants.ENDPOINT}, or it is private (HF_TOKEN)",
            mend=_MEND,
        ) from None
    except HfHubHTTPError:
        return  # it answers: vLLM may fare better with its files
    except Exception as error:  # of whichever HTTP library it uses
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrivetError(
            f"{name!r} is no folder here and not in Hugging Face's cache, and {constants.ENDPOINT} cannot be reached "
            f"({why})",
            mend=_MEND,
        ) from None
