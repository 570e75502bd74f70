"""Models of the Hugging Face hub, fetched by name through huggingface_hub (HF_ENDPOINT, HF_TOKEN and HF_HOME are honoured)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...quant.errors import HalfbyteError
from ..errors import printable, some

PATTERNS = ("*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*")
SKIPPED = ("consolidated*.safetensors", "*/*.safetensors", "onnx/*", "runs/*")
_HTTP = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet", "huggingface_hub")


class HubError(HalfbyteError):
    """A model of the hub cannot be fetched."""


def fetch_model(name: str, tell: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a hub model such as HuggingFaceTB/SmolLM2-135M-Instruct: its safetensors, configuration and tokenizer.

    What the hub's cache has is not fetched again; without a network the cache alone is looked at.
    tell: called with a sentence before something is fetched. Raises HubError.
    """
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not _is_address(host):  # huggingface_hub would stumble over it while it is imported
        raise HubError(f"{name}: HF_ENDPOINT is {printable(host, 60)!r}; it must be an address such as https://huggingface.co, or unset")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    tell(f"fetching {name} from {host}")
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(PATTERNS), ignore_patterns=list(SKIPPED)))
    except GatedRepoError:
        raise HubError(f"{name}: the model is gated; accept its terms at {host}/{name} and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise HubError(f"{name}: no such model at {host} (or it is private: set HF_TOKEN)") from None
    except HFValidationError:
        raise HubError(f"{name}: not the name of a hub model (OWNER/NAME)") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        status = _status(error)
        if status is None:
            problem = f"{host} cannot be reached, and the model is not in the cache; check the network, or name a local path"
        else:
            problem = f"{host} answered with an error {status}; try again later"
        raise HubError(f"{name}: {problem}") from None
    except OSError as error:
        raise HubError(f"{name}: cannot be fetched: {printable(error.strerror or error, 160)}") from None
    except Exception as error:  # the HTTP library's own errors, whichever it is this year
        if type(error).__module__.split(".")[0] not in _HTTP:
            raise
        raise HubError(f"{name}: {host} cannot be reached: {printable(error, 160)}") from None
    if not any(folder.glob("*.safetensors")):
        found = sorted(path.name for path in folder.iterdir())
        raise HubError(f"{name}: holds no safetensors (only {some(found, 4)})")
    return folder


def _is_address(text: str) -> bool:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:
        return False


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, if the hub answered at all."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None
