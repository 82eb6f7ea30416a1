"""Jinja templates of strangers, rendered within bounds: the one door to `jinja2`.

The dialect is that of transformers: sandboxed, blocks trimmed, with loop controls and the block `generation`, whose
body is rendered as it is. A template is a program that came with a tokenizer, so each rendering has a budget of work:
rounds of loops, calls of macros, filters and methods, and characters that any of them makes.
"""

import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SOURCE_CHARACTERS = 2**17
"""Longest template; those of models have some thousand characters."""
MOST_WORK = 2**26
"""Budget of a rendering: one a character, and some more a call or a round of a loop."""
MOST_SECONDS = 5.0
"""Longest time of a rendering, whatever it does."""
_CALL_WORK = 128
# Largest number of values that are written as text at once.
_MOST_VALUES = 10**6
# Numbers of digits that widths and precisions of formats do not have.
_WIDE = re.compile(r"\d{6,}")
_MOST_BITS = 2**16
_TOO_MUCH = MOST_WORK + 1


TemplateFault = TemplateError
"""What jinja2 raises for a template, and this module."""


class TemplateBudgetError(TemplateFault):
    """A template that does more than any conversation needs."""


class _Generation(Extension):
    """Tag `{% generation %} ... {% endgeneration %}`, by which some templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it off the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Nodes whose body may run many times.
_REPEATED: tuple[type[Any], ...] = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)


class _CountingCode(CodeGenerator):
    """Code of templates that spends from the budget in each round of a loop and each call of a macro or block."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        for kind in _REPEATED:
            for one in node.find_all(kind):
                spend = nodes.ExprStmt(nodes.EnvironmentAttribute("spend"), lineno=one.lineno)
                one.body.insert(0, spend.set_environment(self.environment))
        super().visit_Template(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Any) -> None:
        super().visit_ExprStmt(node, frame)
        # Called past the sandbox, which takes longer than a round of a loop.
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.write("()")

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Environment of one template, with the budget of its rendering."""

    code_generator_class = _CountingCode
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], names: Mapping[str, Any]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._before_text,
        )
        self._left, self._end = MOST_WORK, 0.0
        self.concat = self.joined  # type: ignore[method-assign]
        # Text without a meaning, as much as is asked for.
        del self.globals["lipsum"]
        self.globals |= names
        self.filters = {name: self._bounded(name, one) for name, one in {**self.filters, **filters}.items()}
        self.tests = {name: self._bounded(name, one) for name, one in self.tests.items()}

    def compiled(self, source: str) -> Template:
        """The template of a source. Raises whatever jinja2 and Python raise for what is none."""
        if len(source) > MOST_SOURCE_CHARACTERS:
            raise TemplateBudgetError(f"it has {len(source):,} characters, and may have {MOST_SOURCE_CHARACTERS:,}")
        self._begin()
        return self.from_string(source)

    def rendered(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of a template of this environment. Raises whatever the template does, and TemplateBudgetError."""
        self._begin()
        return template.render(variables)

    def _begin(self) -> None:
        self._left, self._end = MOST_WORK, time.thread_time() + MOST_SECONDS

    def spend(self, work: int = _CALL_WORK) -> None:
        """Takes work from the budget. Raises TemplateBudgetError where none is left."""
        self._left -= work
        if self._left < 0 or time.thread_time() > self._end:
            raise TemplateBudgetError("it does more work than any conversation needs: an endless or too long loop")

    def joined(self, parts: Iterable[Any]) -> str:
        """The text of all parts in a row, each paid for before the next is made."""
        texts = []
        for part in parts:
            self.spend(1 + _text_size(part))
            texts.append(str(part))
        return "".join(texts)

    def _before_text(self, value: Any) -> Any:
        self.spend(_text_size(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend(_binop_work(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox has wrapped `format`.
        method = inspect.unwrap(__obj) if callable(__obj) else __obj
        if isinstance(method, BuiltinMethodType):
            __self.spend(_call_work(method.__name__, method.__self__, (*args, *kwargs.values())))
        return __self._paid(super().call(__context, __obj, *args, **kwargs))

    def _bounded(self, name: str, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            # Some are given an environment or a context first.
            given = args[1:] if args and isinstance(args[0], (Environment, Context, nodes.EvalContext)) else args
            self.spend(_call_work(name, given[0] if given else None, (*given[1:], *kwargs.values())))
            return self._paid(function(*args, **kwargs))

        return bounded

    def _paid(self, made: Any) -> Any:
        self.spend(_size(made))
        return made


def _binop_work(operator: str, left: Any, right: Any) -> int:
    """Work of an operation before it is done."""
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return 1 if bits < _MOST_BITS else _TOO_MUCH
    if operator == "*":
        repeated, times = (left, right) if isinstance(right, int) else (right, left)
        return 1 + (_size(repeated) * max(0, times) if isinstance(times, int) else 0)
    if operator == "%" and isinstance(left, str):
        return _format_work(left, right if isinstance(right, tuple) else (right,))
    return 1 + _size(left) + _size(right)


def _call_work(name: str, value: Any, args: tuple[Any, ...]) -> int:
    """Work of a filter, a test or a method of `value` before it is called."""
    work = _CALL_WORK + _size(value) + sum(map(_size, args))
    numbers = sum(abs(one) for one in args if isinstance(one, int))
    if name in _WIDTHS:
        work += numbers
    if name in ("indent", "expandtabs") and isinstance(value, str):
        work += (value.count("\n") + value.count("\t") + 1) * (numbers or max(map(_size, args), default=8))
    elif name == "replace" and len(args) > 1 and isinstance(value, str):
        # By position or by name: either may be what is put in.
        work += max(value.count(str(one)) for one in args) * max(map(_size, args))
    elif name == "translate" and args and isinstance(args[0], dict):
        work += _size(value) * max(map(_size, args[0].values()), default=0)
    elif name == "wordwrap":
        # It cuts a long word again and again.
        work += _size(value) ** 2 // 64
    elif name == "join":
        # A method of the text between the items, or a filter of the items.
        work += _text_size(value) + sum(map(_text_size, args)) + _size(value) * max(map(_size, args), default=0)
    elif name == "tojson":
        work += _text_size(value) * (1 + numbers + max(map(_text_size, args), default=0))
    elif name == "sum" and any(isinstance(one, Sized) and not isinstance(one, str) for one in args):
        # Each addition copies all before it.
        work += _TOO_MUCH
    elif name in ("format", "format_map") and isinstance(value, str):
        work += _format_work(value, args)
    if name in _TEXTS:
        work += _text_size(value)
    return work


# Filters and methods whose result is as long as a number that they are given.
_WIDTHS = frozenset(
    ["center", "ljust", "rjust", "zfill", "batch", "slice", "wordwrap", "round", "tojson", "truncate", "to_bytes"]
)
# Filters that write any value as text.
_TEXTS = frozenset(
    (
        *("string", "pprint", "xmlattr", "escape", "e", "forceescape", "safe", "urlencode", "trim", "upper", "lower"),
        *("title", "capitalize", "center", "wordcount", "striptags", "urlize", "truncate", "indent", "wordwrap"),
        *("replace", "int", "float"),
    )
)
# A field of a format within another one, by which a value may say how wide the other is.
_NESTED = re.compile(r"\{[^{}]*\{")
_DIGITS = re.compile(r"\d+")


def _format_work(text: str, values: Iterable[Any]) -> int:
    """Work of filling values into a format, whose widths may be among the values."""
    given = list(values)
    if _WIDE.search(text) or _NESTED.search(text):
        return _TOO_MUCH
    widths = sum(abs(one) for one in given if isinstance(one, int)) if "*" in text or "{" in text else 0
    longest = max([*map(_text_size, given), *map(int, _DIGITS.findall(text))], default=0)
    return len(text) + widths + (text.count("{") + text.count("%")) * longest


def _size(value: Any) -> int:
    """Characters of a text, or 8 for each item of something else."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, Sized) and not isinstance(value, type) else 0


def _text_size(value: Any) -> int:
    """Least number of characters of a value as text; more than the budget where it holds too many values."""
    size, count, left = 0, 0, [value]
    while left:
        one, count = left.pop(), count + 1
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        if count + len(left) > _MOST_VALUES or size > MOST_WORK:
            return _TOO_MUCH
    return size + count
