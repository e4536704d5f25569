"""Chat templates whose output for a conversation is one text per message, one before and one behind them.

That is shown, not guessed. Most templates are one loop over the messages. Where a pass of that loop sees nothing but
its message, its place, the first message and variables that are the same for all, what it writes is the same in every
conversation that has these in common, and need not be made again at each turn. That holds if

- the template is written in a part of Jinja in which a pass leaves nothing behind: no namespaces, no macros, no
  helpers with a state, time or chance, no iterators that two passes could share (``_NODES`` and the names beneath list
  what is let in). A plain ``set`` ends with its pass, and the sandbox that ``transformers`` uses lets nothing change;
- a pass asks its loop for ``first``, ``last``, ``index`` and ``index0`` only;
- while it ran it asked the conversation for nothing but its first message and, once and at the loop's place, all that
  it holds, or all behind the first (``_Watched`` lets nothing else through).

The first two are seen in the template, the third at each run. ``Separable`` runs the same syntax tree in the same
environment, in which the loop goes over pairs of a message and its place, with marks around each pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import Environment, Template, nodes


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


_PLACE = "_trivet_place"
_MESSAGES = "messages"
_PLACES = frozenset(("first", "last", "index", "index0"))
_NODES = _set(
    "Template Output TemplateData Const Name Getitem Getattr Slice If CondExpr For Assign Filter Test Call Keyword "
    "Compare Operand And Or Not Add Sub Mul Div FloorDiv Mod Neg Pos Concat List Tuple Dict Pair"
)
_FILTERS = _set(
    "abs capitalize count d default first float indent int join last length list lower replace round string title "
    "tojson trim upper"
)
"""Those that look at nothing but what they are given, and return nothing that is used up."""
_TESTS = _set(
    "boolean defined divisibleby eq equalto even false float ge gt in integer le lower lt mapping ne none number odd "
    "sequence string true undefined upper == != < > <= >="
)
_METHODS = _set(
    "capitalize count endswith find get index isdigit items keys lower lstrip removeprefix removesuffix replace rfind "
    "rsplit rstrip split splitlines startswith strip title upper values"
)
_FUNCTIONS = frozenset(("raise_exception", "range"))
_FORBIDDEN = frozenset(
    ("caller", "cycler", "joiner", "kwargs", "lipsum", "namespace", "self", "strftime_now", "varargs")
)


class Inseparable(Exception):  # noqa: N818  (it is an answer, not an error)
    """Why a template is to be run whole, in a few words."""


@dataclass(slots=True)
class Place:
    """What a pass may ask its loop for."""

    first: bool
    last: bool
    index: int
    index0: int


@dataclass(frozen=True, slots=True)
class Passes:
    """What a run has written."""

    before: str
    behind: str
    begin: int
    """The first message that the loop goes over."""
    texts: Sequence[str]
    """Of those that were asked for, in order, from ``begin`` on."""


class Separable:
    """A template in which each message has a text of its own. For several threads."""

    def __init__(self, template: Template, source: str) -> None:
        """
        Args:
            template: compiled, by whatever environment is to run it.
            source: what it was compiled from.

        Raises:
            Inseparable: it is not known to be one.
        """
        environment = template.environment
        if environment.is_async or environment.finalize is not None or environment.autoescape is not False:
            raise Inseparable("its environment is not the one known here")
        tree = environment.parse(source)
        loop = _loop_of(tree)
        asked: set[str] = set()
        _look_at(tree, loop, asked)
        self.places = frozenset(asked)
        """What of ``Place`` it asks for."""
        self._mark = f"\x00{secrets.token_hex(16)}\x00"
        _put_marks(tree, loop, self._mark, environment)
        code = environment.compile(tree)
        self._template = Template.from_code(environment, code, environment.make_globals(None), None)

    def run(self, variables: Mapping[str, Any], messages: Sequence[Any], wanted: Sequence[int]) -> Passes:
        """What it writes for some messages of a conversation, and around them.

        Args:
            variables: all but ``messages``; none of them holds a message or changes.
            wanted: places of messages, ascending.

        Raises:
            Inseparable: it wanted to know more of the conversation than is the same in longer ones.
            Exception: whatever the template raises.
        """
        watch = _Watch(messages, wanted)
        context = self._template.new_context({**variables, _MESSAGES: _Watched(watch, 0)})
        texts: list[list[str]] = [[]]
        try:
            for piece in self._template.root_render_func(context):
                if piece == self._mark:
                    texts.append([])
                else:
                    texts[-1].append(piece)
        except _Asked:
            raise Inseparable("it looks at other messages than its own and the first") from None
        before, nothing, *passes, behind = map("".join, texts) if len(texts) > 2 else ("", "?", "")
        if nothing or watch.begin is None or len(passes) != sum(place >= watch.begin for place in wanted):
            raise Inseparable("its loop was not run as expected")
        return Passes(before, behind, watch.begin, passes)


class _Asked(BaseException):
    """Somebody wanted to know more of a conversation than he may. Jinja and its tests catch every ``Exception``."""


class _Watch:
    def __init__(self, messages: Sequence[Any], wanted: Sequence[int]) -> None:
        self.messages, self.wanted = messages, wanted
        self.begin: int | None = None


class _Watched:
    """A conversation, or what is behind its first message, for a template that is watched."""

    __slots__ = ("__begin", "__watch")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, watch: _Watch, begin: int) -> None:
        self.__watch, self.__begin = watch, begin

    def __getitem__(self, key: Any) -> Any:
        watch, begin = self.__watch, self.__begin
        if type(key) is int and key == 0 and not begin:
            return watch.messages[0]
        if type(key) is slice and (key.start, key.stop, key.step) == (1, None, None) and not begin:
            return _Watched(watch, 1)
        raise _Asked

    def __iter__(self) -> Iterator[tuple[Any, Place]]:
        watch, begin = self.__watch, self.__begin
        if watch.begin is not None:  # a second time: once the loop does it, or its marks are missing
            raise _Asked
        watch.begin = begin
        last = len(watch.messages) - 1
        return iter(
            [
                (watch.messages[place], Place(place == begin, place == last, place - begin + 1, place - begin))
                for place in watch.wanted
                if place >= begin
            ]
        )

    def __bool__(self) -> bool:
        if self.__begin:
            raise _Asked
        return True  # there is a message

    def __asked(self, *_: Any) -> NoReturn:
        raise _Asked

    __getattr__ = __len__ = __contains__ = __reversed__ = __str__ = __repr__ = __format__ = __asked
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __asked
    __add__ = __radd__ = __mul__ = __rmul__ = __int__ = __float__ = __index__ = __asked


def _loop_of(tree: nodes.Template) -> nodes.For:
    """The loop over the messages.

    Raises:
        Inseparable: there is none, or more than one.
    """
    names = {_MESSAGES}
    for assign in tree.find_all(nodes.Assign):
        if _is_part(assign.node, names) and isinstance(assign.target, nodes.Name):
            names.add(assign.target.name)
    loops = list(tree.find_all(nodes.For))
    found = [loop for loop in loops if _is_part(loop.iter, names)]
    outer = [loop for loop in found if not any(one is not loop and _holds(one, loop) for one in loops)]
    if len(outer) != 1:
        raise Inseparable("it has no loop over the messages" if not outer else "it has several loops over the messages")
    return outer[0]


def _is_name(node: nodes.Node, names: set[str] | None = None) -> bool:
    return isinstance(node, nodes.Name) and (names is None or node.name in names)


def _is_part(node: nodes.Node, names: set[str]) -> bool:
    """Whether this is one of these names, or all of it behind some place."""
    return _is_name(node, names) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and _is_name(node.node, names)
    )


def _holds(node: nodes.Node, other: nodes.Node) -> bool:
    return any(one is other for one in node.find_all(type(other)))


def _look_at(node: nodes.Node, main: nodes.For, asked: set[str], inside: bool = False, *, owns: bool = True) -> None:
    """Looks for what is not known to leave nothing behind.

    Args:
        asked: what a pass asks its loop for is put here.
        inside: whether this is a part of the loop over the messages.
        owns: whether ``loop`` is that one here.

    Raises:
        Inseparable: there is something.
    """
    kind = type(node).__name__
    if kind not in _NODES:
        raise Inseparable(f"it has what is not known here ({kind})")
    if isinstance(node, nodes.Name):
        if node.name in _FORBIDDEN or node.name.startswith("_") or (node.name == "loop" and owns):
            raise Inseparable(f"it uses {node.name}")
    elif isinstance(node, nodes.Getattr):
        if node.attr.startswith("_"):
            raise Inseparable(f"it asks for {node.attr}")
        if _is_name(node.node, {"loop"}) and owns and inside:
            if node.attr not in _PLACES:
                raise Inseparable(f"it uses loop.{node.attr}")
            asked.add(node.attr)
            return
    elif isinstance(node, nodes.Filter):
        if node.name not in _FILTERS or node.node is None:
            raise Inseparable(f"it uses the filter {node.name}")
    elif isinstance(node, nodes.Test):
        if node.name not in _TESTS:
            raise Inseparable(f"it uses the test {node.name}")
    elif isinstance(node, nodes.Call):
        _look_at_call(node)
    elif isinstance(node, nodes.For):
        if node.recursive or (node is main and (node.test or node.else_ or not _is_name(node.target))):
            raise Inseparable("its loop is not a plain one")
        for one in _around(node):
            _look_at(one, main, asked, inside, owns=owns)
        for one in node.body:
            _look_at(one, main, asked, inside or node is main, owns=node is main)
        return
    for child in node.iter_child_nodes():
        _look_at(child, main, asked, inside, owns=owns)


def _around(loop: nodes.For) -> Iterator[nodes.Node]:
    """What of a loop is not its passes: there ``loop`` is another one."""
    yield from (loop.target, loop.iter, *([loop.test] if loop.test else ()), *loop.else_)


def _look_at_call(node: nodes.Call) -> None:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        raise Inseparable("it calls something with arguments not known here")
    called = node.node
    if isinstance(called, nodes.Name) and called.name in _FUNCTIONS:
        return
    if isinstance(called, nodes.Getattr) and called.attr in _METHODS:
        return
    raise Inseparable(f"it calls {getattr(called, 'name', None) or getattr(called, 'attr', type(called).__name__)}")


def _put_marks(tree: nodes.Template, loop: nodes.For, mark: str, environment: Environment) -> None:
    def a_mark() -> nodes.Output:
        return nodes.Output([nodes.TemplateData(mark, lineno=loop.lineno)], lineno=loop.lineno)

    for part in loop.body:
        _ask_place(part)
    loop.target = nodes.Tuple([loop.target, nodes.Name(_PLACE, "store")], "store", lineno=loop.lineno)
    loop.body.insert(0, a_mark())
    holders: list[nodes.Template | nodes.If] = [tree, *tree.find_all(nodes.If)]
    for holder in holders:
        for body in (holder.body, *([holder.else_] if isinstance(holder, nodes.If) else ())):
            for number, one in enumerate(body):
                if one is loop:
                    body[number : number + 1] = [a_mark(), loop, a_mark()]
                    break
    tree.set_environment(environment)


def _ask_place(node: nodes.Node) -> None:
    """Has a part of a pass ask the place that it is given, not the loop."""
    if isinstance(node, nodes.Getattr) and _is_name(node.node, {"loop"}):
        node.node = nodes.Name(_PLACE, "load", lineno=node.lineno)
        return
    for child in _around(node) if isinstance(node, nodes.For) else node.iter_child_nodes():
        _ask_place(child)
