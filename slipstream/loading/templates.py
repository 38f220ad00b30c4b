"""Where a model keeps its chat template, without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.loading.gguf_file import is_gguf, open_gguf
from slipstream.loading.hf_config import read_json

GGUF_KEY = "tokenizer.chat_template"


def default_template(config: dict[str, Any]) -> str | None:
    """The template in tokenizer_config.json; of several named ones, the default."""
    given = config.get("chat_template")
    if isinstance(given, list):
        given = {item["name"]: item["template"] for item in given}.get("default")
    return given


def check_template(given: str) -> None:
    """given: --chat-template, a file or Jinja source. Raises ValueError where it is neither."""
    if "{" not in given and not Path(given).expanduser().is_file():
        raise ValueError(f"--chat-template={given!r}: neither a template nor a file")


def find_template(path: str | Path) -> str:
    """path: of the tokenizer. chat_template.jinja, tokenizer_config.json or the GGUF field that holds it;
    empty where there is none. Raises ValueError for files that cannot be read."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"tokenizer={str(path)!r}: no such folder or file")
    if path.is_dir():
        if (path / "chat_template.jinja").exists():
            return "chat_template.jinja"
        file = path / "tokenizer_config.json"
        return file.name if file.exists() and default_template(read_json(file)) else ""
    return GGUF_KEY if is_gguf(path) and open_gguf(path).get(GGUF_KEY) else ""
