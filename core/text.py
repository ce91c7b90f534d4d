"""Text to token ids and back, and chat messages to token ids.

Tokenizers come from tokenizer.json (through the library `tokenizers`), from a GGUF file's metadata, or are bytes.
transformers is imported only for a directory without tokenizer.json: the import alone takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from core.chat import ChatTemplate
from core.detokenizer import Detokenizer as Detokenizer
from core.files import read_object
from core.gguf_file import GGUFFile
from core.gguf_tokenizer import gguf_backend, gguf_special_tokens


class Backend(Protocol):
    """What a tokenizer library must do."""

    size: int  # ids are below this

    def encode(self, text: str, special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """Encodes, decodes and applies the chat template of one checkpoint."""

    def __init__(self, backend: Backend, template: ChatTemplate | None = None, eos: Iterable[int] = ()) -> None:
        self._backend, self._template = backend, template
        self.eos_token_ids = frozenset(eos)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included; the model's own may be larger (padded)."""
        return self._backend.size

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the checkpoint puts around a text (such as a BOS token)."""
        return self._backend.encode(text, special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._backend.decode(ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the assistant speaks; the template itself writes all special tokens."""
        if self._template is None:
            raise ValueError("this checkpoint has no chat template: give plain prompts (chat=off, or LLM.generate)")
        return self._backend.encode(self._template.render(messages), False)


class LibraryBackend:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.size: int = library.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool) -> list[int]:
        return self.library.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=True)


class ByteBackend:
    """Ids 0 to 255 are the bytes of UTF-8; ids above (a model's spare rows) decode to nothing."""

    size = 256

    def encode(self, text: str, special: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class TransformersBackend:
    """A tokenizer that only transformers can load."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)

    def encode(self, text: str, special: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """For a model with at least 256 tokens."""
    if vocab_size < 256:
        raise ValueError(f"model.tokenizer=byte needs a vocabulary of at least 256 tokens, the model has {vocab_size}")
    return Tokenizer(ByteBackend())


def gguf_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """From a GGUF file's metadata; None if it holds none."""
    if file.fields.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return None
    source = file.fields.get("tokenizer.chat_template")
    named, eos = gguf_special_tokens(file)
    return Tokenizer(LibraryBackend(gguf_backend(file)), ChatTemplate(source, named) if source else None, eos)


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """From a Hugging Face directory; None if it holds no tokenizer."""
    settings = read_object(folder / "tokenizer_config.json")
    backend: Backend
    if (folder / "tokenizer.json").is_file():
        import tokenizers

        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.no_truncation()
        library.no_padding()
        backend, lookup = LibraryBackend(library), library.token_to_id
    elif any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")):
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend, lookup = TransformersBackend(loaded), loaded.convert_tokens_to_ids
    else:
        return None
    named = _special_tokens(folder, settings)
    source = _chat_template(folder, settings)
    eos = lookup(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(backend, ChatTemplate(source, named) if source else None, () if eos is None else (eos,))


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ...: their text, as templates know them."""
    given = {**read_object(folder / "special_tokens_map.json"), **settings}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in given.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's; of several named ones the default."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}.get("default")
    return given
