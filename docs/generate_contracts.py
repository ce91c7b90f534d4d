"""Writes docs/contracts/*.md from core/interfaces.py (and core/params.py): `python docs/generate_contracts.py [--check]`.

Facts (signatures, types, defaults, docstrings, comments beside fields) come from the source. Only the paragraphs in PAGES are
written by hand: they say what a kind decides, what it must leave alone, and where to start from.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "contracts"
SOURCES = ("core/interfaces.py", "core/params.py", "core/capabilities.py")
HEAD = "<!-- Written by docs/generate_contracts.py from core/interfaces.py: edit there, then run it again. -->\n"
LETTERS = (
    "Letters in shapes: T tokens of a step, B chunks of a step, S rows drawn, N changed table entries, M blocks of the longest "
    "row, H query heads, K KV heads, D head size, E hidden size, V vocabulary (of this rank)."
)


@dataclass(frozen=True)
class Page:
    """One contract. `text` is the part written by hand; `context` is what a component is built with."""

    title: str
    main: str  # the class that a component extends
    text: str
    context: str = ""
    others: tuple[str, ...] = ()  # classes that the main one is given or answers


PAGES: Mapping[str, Page] = {
    "scheduler": Page(
        "Scheduler: who advances, and by how many tokens",
        "Scheduler",
        """A step is a list of (request, number of tokens). There is no phase: a decode is a chunk of one token, a prompt is one
or several longer chunks. The scheduler asks for each chunk with `step.grant(request, ...)`; the step builder answers
how many tokens it got, and `step.short` says why it got none. The scheduler keeps its own queues. It sees no tensor
and reads no clock but `step.now`.

- Look at `step.short` before you evict: only `blocks` means that somebody must give way.
- Reserve blocks for a whole prompt at its first grant (`reserve=request.length`), or never preempt by reserving all
  that the request can need (`reserve=request.limit`). Half-admitted prompts that wait for each other's blocks stop
  the engine.
- `remove` may come while the request's last step is in flight. Forget it then.

Start from `inferlab plugins new NAME --kind scheduler`, `plugins/schedulers/mixed.py`, or `examples/longest_prefix`,
which uses `step.cached`.""",
        "HostContext",
        ("Step", "Request", "Seat", "Limits"),
    ),
    "kv_allocator": Page(
        "KV allocator: which blocks a request holds, and what is found again",
        "KVAllocator",
        """It owns the ids 1 to `num_blocks`; id 0 is scratch and never handed out. It knows nothing of requests: the step
builder calls it with token lists and ids, and is the only caller. After every step `audit()` must add up to
`num_blocks`.

- `match` only looks. It is called for every waiting request that a scheduler asks about, also where nothing is
  granted then.
- `allocate` is all or nothing.
- A hit compares the block's own tokens and what came before them, not only hashes.
- `keys` is a list that belongs to the request and to you: keep hashes in it, so that a prompt is hashed once.

Settings extend `KVSettings`, since `block_size` is a word of the core's. State `prefix_cache` in `provides` where
content is found again. Start from `inferlab plugins new NAME --kind kv_allocator` or `plugins/kv_allocators/paged.py`
(which shares nothing).""",
        "HostContext",
        ("KVSettings", "Limits"),
    ),
    "attention": Page(
        "Attention backend: the layout of the cache, and attention itself",
        "AttentionBackend",
        """Keys and values of a step are stored at `batch.kv_slots` before anything is read: a chunk may read what another chunk
of the same batch writes. Then every query attends to its own past, through the block table. Which layout the cache
has is the backend's business alone.

- What was never written may be NaN. Nothing beyond a chunk's length may enter the result, not even multiplied by 0.
- Lengths are at least 1. Padded rows of captured batches have length 1 on block 0.
- Offsets may pass 2**31.
- Say in `capabilities` what you need (block size, head size, dtype, device, graphs): what is not declared is
  promised.

Start from `inferlab plugins new NAME --kind attention`, `plugins/attention/reference.py` (the definition that all
others are tested against), or `examples/window_sinks`, which has a mask and settings of its own.""",
        "DeviceContext",
        ("Batch", "KVSpec", "Prologue", "Limits"),
    ),
    "arch": Page(
        "Architecture: the equations of a model",
        "ModelArch",
        """Positions and tokens in, hidden states out. Attention is a function that the model is given: it sees no cache, no
batch and no phase. q and k are handed over un-normed and un-rotated with a `Prologue` that says what happens to them,
so that a backend may fuse it.

- `weights()` names every tensor of the checkpoint with its full shape. What is missing, unexpected or misshapen is
  refused by the core.
- Read only your rank's part of a `Weight`: index it.
- `from_gguf` is first asked to undo a narrow tensor of numbered elements. If it only moves whole rows, each rank reads
  its own rows of the file. If it does anything else, each rank reads the whole tensor.
- `provides` says which words of config.json (`architectures`) and of GGUF (`gguf_architectures`) mean this
  architecture.
- `provides["shares"]` says how heads and sizes are shared out over ranks, so that a `tensor_parallel_size` that does not
  fit is refused before anything is loaded. `core/shares.py` has the words.

Start from `inferlab plugins new NAME --kind arch` or `plugins/models/qwen3.py` (a few lines over the common decoder).""",
        "DeviceContext",
        ("Attend", "KVSpec", "Prologue", "Weight", "Parallel", "Limits"),
    ),
    "sampler": Page(
        "Sampler: how a token is drawn from logits",
        "Sampler",
        """Parameters are kept by slot: `admit` writes a row, `sample` reads the rows that it is given. What a row draws depends
on its logits, its request's seed and the position, never on batch mates, chunking or preemption: make the noise a
function of (seed, position, token).

- -1 for a row without a finite logit, or with NaN: that request ends with an error, the others go on.
- Temperature 0 is argmax, the lowest id among equals.
- Parameters of your own are a dataclass, `request_settings`: they arrive in `params.extra`, typed and checked, and
  are set by `SamplingParams(mine=...)` and `sampling.mine=...`.
- `provides={"wants_history": True}` makes `admit` get the known tokens of the request.
- Limits on parameters are capabilities: `"sampling.temperature": OneOf(0)`.

Start from `inferlab plugins new NAME --kind sampler` or `examples/repetition`, which has a parameter of its own
and uses the history.""",
        "DeviceContext",
        ("SamplingParams", "Rows", "Sampled", "Limits"),
    ),
    "executor": Page(
        "Executor: where plans are run",
        "Executor",
        """The engine hands out plans in order and waits for tokens in `Drawn.wait()`, nowhere else. It knows nothing of what is
behind: one rank in this process, worker processes, or a simulation. An executor builds model, attention backend and
sampler from the resolved choice that it is given, and looks for no plugins itself.

- With overlap the next plan is launched before the tokens of the last one are known. Its `ON_DEVICE` tokens are those
  that the step before drew for the same slot.
- `launch` must have taken what it needs from the plan when it returns.
- `close` releases everything, and twice is fine.

Start from `plugins/executors/local.py`, which wraps the core's runner.""",
        "",
        ("StepPlan", "Drawn", "Sampled"),
    ),
    "component": Page(
        "Component: the declaration of an option",
        "Component",
        """What the hook `inferlab_components` yields, one for each option that a plugin adds. The module that declares it is
imported at every start, so it must import neither torch nor anything else that is slow; `target` is imported only
when the option is chosen. Fields of `settings` are the options on the command line: plain types with defaults,
checked in `__post_init__` with a ValueError that says the value, the limit and the way out.

Capabilities are data. Before torch is imported they are compared with the settings, the model, the machine and the
other parts; whatever does not fit is reported at once, with its way out. Where a setting is `auto`, they choose its
value.""",
        "",
        ("NoSettings", "OneOf", "MultipleOf", "AtLeast", "Probe"),
    ),
}


@dataclass(frozen=True)
class Source:
    """A class, and the lines of its file: comments are in no syntax tree."""

    node: ast.ClassDef
    lines: list[str]


def classes() -> dict[str, Source]:
    found: dict[str, Source] = {}
    for name in SOURCES:
        text = (ROOT / name).read_text(encoding="utf-8")
        body = ast.parse(text).body
        found |= {node.name: Source(node, text.splitlines()) for node in body if isinstance(node, ast.ClassDef)}
    return found


def pages() -> dict[str, str]:
    """File name -> what it should hold."""
    found = classes()
    return {f"{kind}.md": "\n".join(_page(kind, page, found)) for kind, page in PAGES.items()}


def _page(kind: str, page: Page, found: Mapping[str, Source]) -> Iterator[str]:
    yield HEAD
    yield f"# {page.title}\n"
    yield f"{page.text}\n"
    if kind != "component":
        yield f'It is declared as a [component](component.md) with `kind="{kind}"`.\n'
        yield f"{LETTERS}\n"
    yield from _class(found[page.main], "##")
    if page.context:
        yield "## What it is built with\n\n`Class(settings, context)`; both are kept as `self.settings` and `self.context`.\n"
        yield from _class(found[page.context], "###")
    yield "## What it is given and answers\n" if kind != "component" else "## Constraints and probes\n"
    for name in page.others:
        yield from _class(found[name], "###") if name in found else _alias(name)


def _alias(name: str) -> Iterator[str]:
    """A type with a name, and the docstring below it."""
    body = ast.parse((ROOT / SOURCES[0]).read_text(encoding="utf-8")).body
    at = next(i for i, n in enumerate(body) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name)
    doc = body[at + 1]
    assert isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant), f"{name} has no docstring"
    yield f"### `{name}`\n\n`{ast.unparse(body[at])}`\n\n{doc.value.value}\n"


def _class(source: Source, level: str) -> Iterator[str]:
    yield f"{level} `{source.node.name}`\n"
    if doc := ast.get_docstring(source.node):
        yield f"{doc}\n"
    if rows := list(_fields(source)):
        yield "| field | type | default | |\n|---|---|---|---|"
        yield from rows
        yield ""
    for node in source.node.body:
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__getitem__"):
            yield from _method(node, source)


def _fields(source: Source) -> Iterator[str]:
    body = source.node.body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = _comment(source.lines[node.end_lineno - 1] if node.end_lineno else "")
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                comment = " ".join(str(after.value.value).split())
            default, doc = _default(node.value)
            comment, kind = doc or comment, ast.unparse(node.annotation)
            yield f"| `{node.target.id}` | {_cell(f'`{kind}`')} | {_cell(default)} | {_cell(comment)} |"


def _default(value: ast.expr | None) -> tuple[str, str]:
    """(the default as it is read, what `setting` says of it)"""
    if value is None:
        return "", ""
    text = ast.unparse(value)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "setting":
        default, *words = (ast.literal_eval(a) for a in value.args)
        return f"`{default}`", ", ".join(reversed(words))
    if text.startswith("field(init=False"):
        return "set by itself", ""
    if found := re.fullmatch(r"field\(default_factory=(\w+)(?:, .*)?\)", text):
        text = {"dict": "{}", "list": "[]"}.get(found[1], f"{found[1]}()")
    return f"`{text}`", ""


def _method(node: ast.FunctionDef, source: Source) -> Iterator[str]:
    decorators = {ast.unparse(d) for d in node.decorator_list}
    answer = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if "property" in decorators:
        yield f"**`{node.name}{answer}`**"
    else:
        arguments = re.sub(r"^self(, /)?(, )?", "", ast.unparse(node.args))
        note = " (required)" if "abstractmethod" in decorators else ""
        yield f"**`{node.name}({arguments}){answer}`**{note}"
    doc = ast.get_docstring(node) or _comment(source.lines[(node.end_lineno or node.lineno) - 1])
    yield f"\n{doc}\n" if doc else ""


def _comment(line: str) -> str:
    """What stands behind the code of a line."""
    found = re.search(r"\s#\s(?!noqa|type:)(.*)$", line)
    return found[1] if found else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check name those that are not current; exit code 1 then."""
    wanted = pages()
    if "--check" in arguments:
        stale = [n for n, text in wanted.items() if not (FOLDER / n).is_file() or (FOLDER / n).read_text("utf-8") != text]
        if stale:
            print(f"not current: {', '.join(stale)}; run python docs/generate_contracts.py", file=sys.stderr)
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
