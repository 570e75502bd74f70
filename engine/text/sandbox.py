"""The sandbox that chat templates run in: Jinja's, as transformers sets it up, with bounds on time and memory.

Jinja's sandbox keeps a template from reaching Python, but not from making a text of 10 GB with one call or one filter. Here every round of
a loop and every call is a step, of which there are MAX_STEPS, and everything that makes something (operators, methods of texts, filters,
slices, what is printed) pays for its size out of MAX_MADE before it is made where the size can be known, else at once after.
So a rendering ends within seconds and a few hundred MB, whatever the template does.

Imports jinja2 (25-45 ms), so this module is imported when a template is first used.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SIZE = 1 << 24
"""Longest text or list that one operator may make."""
MAX_BITS = 1 << 14
"""Most bits of a whole number that an operator may make: more than can be printed."""
MAX_MADE = 1 << 28
"""Characters of texts and 8 times the entries of lists that one rendering may make in all."""
MAX_STEPS = 300_000
"""Most rounds of loops and calls in one rendering; real templates take a few for each message."""
MAX_ENTRIES = 1 << 20
"""Most entries of lists within lists that are looked at together, however they are shared."""
MAX_INDENT = 32

_WIDE = re.compile(r"\d{5}")
_CONTAINERS = (list, tuple, dict, set, frozenset)
_SHALLOW = frozenset({"length", "count", "first", "last", "list", "items", "reverse", "random", "map", "select", "reject", "selectattr",
                      "rejectattr", "default", "d", "attr", "batch", "slice"})  # fmt: skip
_WRITING = frozenset({"tojson", "string", "pprint", "escape", "e", "forceescape", "join", "urlize", "urlencode", "xmlattr"})


def environment() -> Environment:
    """A new environment for one template."""
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.filters = {name: made.bounded(name, function) for name, function in made.filters.items()}
    made.tests = {name: made.bounded(f"is {name}", function) for name, function in made.tests.items()}  # type: ignore[arg-type]
    del made.globals["lipsum"]
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    made.globals["dict"] = lambda *entries, **named: dict(*entries, **named)
    made.globals["namespace"] = _PlainNamespace
    made.finalize = made.printed
    return made


class Environment(ImmutableSandboxedEnvironment):
    """Counts what a rendering does, per thread. `begin` before each."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._left = threading.local()
        super().__init__(*arguments, **options)
        self.concat = self.concatenated  # type: ignore[method-assign]  # what compiled templates join their output with

    def begin(self) -> None:
        self._left.steps, self._left.room = MAX_STEPS, MAX_MADE

    def take(self, count: int) -> None:
        """Pays for steps."""
        self._left.steps = getattr(self._left, "steps", MAX_STEPS) - count
        if self._left.steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")

    def pay(self, size: int, what: str) -> None:
        """Pays for something of a size."""
        if size > MAX_SIZE:
            raise SecurityError(f"{what} would make something larger than {MAX_SIZE}")
        self._left.room = getattr(self._left, "room", MAX_MADE) - size
        if self._left.room < 0:
            raise SecurityError(f"it makes more than {MAX_MADE} characters")

    def weigh(self, value: Any, texts: bool = True) -> int:
        """How large a value is when it is written out, or walked through: entries of lists within lists included, however shared.

        texts: texts in it count with their length, else as one.
        """
        if isinstance(value, str):
            return len(value) if texts else 1 + (len(value) >> 6)
        if not isinstance(value, _CONTAINERS):
            return 1
        size, entries, waiting = 0, 0, [value]
        while waiting:
            inner = waiting.pop()
            size += 4
            if isinstance(inner, str):
                size += len(inner) if texts else 0
            elif isinstance(inner, _CONTAINERS):
                waiting += inner
                if isinstance(inner, dict):
                    waiting += inner.values()
            entries += 1
            if entries + len(waiting) > MAX_ENTRIES:
                raise SecurityError(f"lists in lists become larger than {MAX_ENTRIES} entries")
        return size

    # ---- what compiled templates call ----------------------------------------------------------------------------------

    def rounds(self, items: Any) -> Any:
        """What a loop runs over, with its rounds counted."""
        if hasattr(items, "__len__"):
            self.take(len(items))
            return items
        return self._one_by_one(items)

    def _one_by_one(self, items: Any) -> Iterator[Any]:
        for item in items:
            self.take(1)
            yield item

    def joined(self, *parts: Any) -> str:
        """What `~` makes."""
        self.pay(sum(map(self.weigh, parts)), "~")
        return "".join([str(part) for part in parts])

    def printed(self, value: Any) -> Any:
        """What {{ … }} puts into the text."""
        self.pay(self.weigh(value), "{{ }}")
        return value

    def concatenated(self, parts: Iterable[str]) -> str:
        """The whole text, or that of a macro or block."""
        texts, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_SIZE:
                raise SecurityError(f"its text would be larger than {MAX_SIZE}")
            texts.append(part)
        self.pay(size, "the text")
        return "".join(texts)

    def literal(self, value: Any) -> Any:
        """A list, tuple or mapping that is spelled out."""
        self.pay(8 * len(value), "a list")
        return value

    def sliced(self, value: Any) -> Any:
        """What a slice is cut from."""
        if isinstance(value, (str, list, tuple)):
            self.pay(len(value) * (1 if isinstance(value, str) else 8), "a slice")
        return value

    def compared(self, value: Any) -> Any:
        """What stands on a side of a comparison, or is a key."""
        if isinstance(value, (str, *_CONTAINERS)):
            self.pay(self.weigh(value, texts=False), "a comparison")
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.compared(argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sequences = [isinstance(x, (str, list, tuple)) for x in (left, right)]
        numbers = isinstance(left, int) and isinstance(right, int)
        unit = 1 if isinstance(left, str) or isinstance(right, str) else 8
        if operator == "%" and isinstance(left, str):
            self._pay_format(left, right if isinstance(right, tuple) else (right,), "*" in left)
        elif operator == "+" and all(sequences):
            self.pay(unit * (len(left) + len(right)), operator)
        elif numbers and operator != "%":
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise SecurityError(f"{operator} would make a number of more than {MAX_BITS} bits")
        elif operator == "*" and any(sequences) and (isinstance(left, int) or isinstance(right, int)):
            self.pay(unit * (left * len(right) if sequences[1] else len(left) * right), operator)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __object: Any, *arguments: Any, **named: Any) -> Any:
        __self.take(1)
        method = getattr(__object, "__wrapped__", __object)  # format and format_map come wrapped
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            arguments = __self._pay_method(method.__name__, owner, arguments, named)
        elif isinstance(owner, _CONTAINERS):
            __self.pay(8 * len(owner) + sum(__self.weigh(x, texts=False) for x in arguments), method.__name__)
        return super().call(__context, __object, *arguments, **named)

    # ---- what methods and filters make ---------------------------------------------------------------------------------

    def _pay_method(self, name: str, text: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Pays for a method of a text; the arguments, with lists in the place of what can be walked through only once."""
        values = [*arguments, *named.values()]
        if name in ("format", "format_map"):
            nested = re.search(r":[^{}]*\{", text) is not None
            self._pay_format(text, values, nested)
        elif name == "join" and len(arguments) == 1:
            arguments = ([*arguments[0]],)
            self._pay_join(text, arguments[0])
        elif name == "replace" and len(arguments) >= 2:
            self._pay_replace(text, arguments[0], arguments[1])
        elif name == "translate" and len(arguments) == 1 and isinstance(arguments[0], Mapping):
            longest = max((len(value) for value in arguments[0].values() if isinstance(value, str)), default=1)
            self.pay(len(text) * max(longest, 1), name)
        else:
            width = self._widest(values, name)
            self.pay(len(text) + width * (1 + (text.count("\t") if name == "expandtabs" else 0)), name)
        return arguments

    def _pay_join(self, between: str, parts: list[Any]) -> None:
        self.pay(sum(map(self.weigh, parts)) + len(between) * len(parts), "join")

    def _pay_replace(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.pay(len(text) + (text.count(old) if old else len(text) + 1) * len(new), "replace")

    def _pay_format(self, text: str, values: Iterable[Any], widths: bool) -> None:
        """widths: the values may say how wide something is to be."""
        if _WIDE.search(text):
            raise SecurityError("a format asks for something too wide")
        if widths:
            self._widest(values, "a format")
        fields = text.count("%") + text.count("{")
        self.pay(len(text) + fields * (sum(map(self.weigh, values)) + 10_000 * widths), "a format")

    def _widest(self, values: Iterable[Any], what: str) -> int:
        """The largest of the whole numbers among arguments, which must be small."""
        widest = max((abs(value) for value in values if isinstance(value, int)), default=0)
        if widest > MAX_RANGE:
            raise SecurityError(f"{what} takes numbers up to {MAX_RANGE} only")
        return widest

    def bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that pays for its work. Jinja's marks on the function, which say what it is called with, are kept."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            self.take(1)
            arguments = self._pay_filter(name, arguments, first, named)
            result = function(*arguments, **named)
            if isinstance(result, (str, list, tuple, dict)):
                self.pay(len(result) * (1 if isinstance(result, str) else 8), name)
            return result

        return run

    def _pay_filter(self, name: str, arguments: tuple[Any, ...], first: int, named: Mapping[str, Any]) -> tuple[Any, ...]:
        if len(arguments) <= first:
            return arguments
        value, rest = arguments[first], [*arguments[first + 1 :], *named.values()]
        if name == "join":
            value = [*value]
            between = next((x for x in rest if isinstance(x, str)), "")
            self._pay_join(between, value)
            return *arguments[:first], value, *arguments[first + 1 :]
        if name == "replace" and len(rest) >= 2:
            self._pay_replace(str(value), rest[0], rest[1])
        elif name == "format":
            self._pay_format(str(value), rest, "*" in str(value))
        elif name == "indent":
            lines = str(value).count("\n") + 1
            self.pay(self.weigh(value) + lines * max([len(x) for x in rest if isinstance(x, str)] + [self._widest(rest, name)]), name)
        elif name == "wordwrap":
            self.pay(self.weigh(value) * (1 + max([len(x) for x in rest if isinstance(x, str)], default=1)), name)
        elif name == "tojson":
            if self._widest(rest, name) > MAX_INDENT or any(isinstance(x, str) and len(x) > MAX_INDENT for x in rest):
                raise SecurityError(f"tojson indents by at most {MAX_INDENT}")
            self.pay(self.weigh(value), name)
        elif name == "sum" and any(isinstance(x, (list, tuple)) for x in rest):
            raise SecurityError("sum adds numbers only")
        elif name.startswith("is ") or name not in _WRITING:
            self._widest(rest if name in ("center", "truncate", "batch", "slice") else (), name)
            shallow = name in _SHALLOW
            self.pay((len(value) if shallow and isinstance(value, _CONTAINERS) else 1 if shallow else self.weigh(value, texts=False)), name)
            if not shallow:
                self.pay(sum(self.weigh(x, texts=False) for x in rest), name)
        else:
            self.pay(self.weigh(value), name)
        return arguments

    def _generate(self, source: Any, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Limiter().visit(source), *arguments, **options)


class _Limiter(NodeTransformer):
    """Puts calls of the environment around what must be counted, and `joined` in the place of `~`."""

    def visit_For(self, node: Any) -> Any:
        node = self.generic_visit(node)
        node.iter = self._call("rounds", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: Any) -> Any:
        node = self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)

    def visit_List(self, node: Any) -> Any:
        node = self.generic_visit(node)
        return self._call("literal", [node], node.lineno)

    def visit_Tuple(self, node: Any) -> Any:
        node = self.generic_visit(node)
        return self._call("literal", [node], node.lineno) if node.ctx == "load" else node

    def visit_Dict(self, node: Any) -> Any:
        for pair in node.items:
            pair.key, pair.value = self.visit(pair.key), self.visit(pair.value)
            if not isinstance(pair.key, nodes.Const):
                pair.key = self._call("compared", [pair.key], node.lineno)
        return self._call("literal", [node], node.lineno)

    def visit_Getitem(self, node: Any) -> Any:
        node = self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._call("sliced", [node.node], node.lineno)
        return node

    def visit_Compare(self, node: Any) -> Any:
        node = self.generic_visit(node)
        for side in (node, *node.ops):
            if not isinstance(side.expr, nodes.Const):
                side.expr = self._call("compared", [side.expr], node.lineno)
        return node

    def _call(self, name: str, arguments: list[Any], line: int) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks what the assistant wrote, for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (the base class wants it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _PlainNamespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no names that begin with an underscore, such as {name!r}")
        super().__setitem__(name, value)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise JinjaError(message)
