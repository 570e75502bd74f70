"""Chat templates among GGUF's metadata keys: one, or several by name."""

from __future__ import annotations

from typing import Any

from .metadata import Metadata


def template_of(metadata: Metadata) -> str | dict[str, str] | None:
    """The chat template, or the templates by name, among GGUF's keys."""
    template: str | None = metadata.get("tokenizer.chat_template", None, str)
    named = {}
    for name in metadata.get("tokenizer.chat_templates", [], list):
        text = metadata.get(f"tokenizer.chat_template.{name}", None, str)
        if text is not None:
            named[str(name)] = text
    if not named:
        return template
    return named if template is None else {"default": template, **named}


def template_keys(template: str | dict[str, str] | None) -> dict[str, Any]:
    """GGUF's keys for chat templates."""
    if template is None:
        return {}
    if isinstance(template, str):
        return {"tokenizer.chat_template": writable(template)}
    keys: dict[str, Any] = {"tokenizer.chat_templates": [writable(name) for name in template if name != "default"]}
    for name, text in template.items():
        keys["tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{writable(name)}"] = writable(text)
    return keys


def writable(text: str) -> str:
    """The text without lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
