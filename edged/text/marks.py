"""Control marks: the control tokens a chat template itself writes, told apart from user text.

A literal such as <|im_end|> in the template's own constants becomes one lone surrogate, its
mark. User text cannot hold one, so after rendering marks are control tokens and everything else
is text, whatever the template cuts, joins or replaces in the user's words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation")
ROLE_FILTER = "edged_role_token"
LOOP_FILTER = "edged_counted"

_FIRST_MARK = 0xD800
_LAST_MARK = 0xDFFF
_MARK = re.compile("([\ud800-\udfff])")
# Methods whose (first) argument is compared with a text and never becomes part of it.
_LOOKS_ONLY = frozenset(
    (
        *("startswith", "endswith", "removeprefix", "removesuffix", "strip", "lstrip", "rstrip"),
        *("split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex"),
        *("count", "replace"),
    )
)


class ControlMarks:
    """The marks of one template. Only literals it uses get one."""

    def __init__(self, literals: Sequence[str]) -> None:
        """literals: all control tokens of the model."""
        longest_first = sorted((text for text in literals if text), key=len, reverse=True)
        self._known = frozenset(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._mark_of: dict[str, str] = {}
        self._literal_of: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """The text with every control literal replaced with its mark."""
        return self._pattern.sub(lambda match: self._assign(match.group()), text)

    def mark_role(self, before: str, role: object, after: str) -> str:
        """before + role + after, as a mark if the role is a known one and that is a token."""
        text = f"{before}{role}{after}"
        if role in ROLES:
            return self._mark_of.get(text, text)
        return text

    def prepare_roles(self, before: str, after: str) -> bool:
        """True if some role makes a control token between these two; gives those their marks."""
        made = [text for role in ROLES if (text := before + role + after) in self._known]
        for text in made:
            self._assign(text)
        return bool(made)

    def split(self, rendered: str) -> list[str]:
        """Text, control literal, text, control literal, ..., text."""
        parts = _MARK.split(rendered)
        parts[1::2] = [self._literal_of[mark] for mark in parts[1::2]]
        return parts

    def unmark(self, text: str) -> str:
        """The text as a reader would see it, literals for marks."""
        return _MARK.sub(lambda match: self._literal_of.get(match.group(), "\ufffd"), text)

    def _assign(self, literal: str) -> str:
        if literal not in self._mark_of:
            mark = chr(_FIRST_MARK + len(self._mark_of))
            if ord(mark) > _LAST_MARK:
                raise ValueError("the template writes more control tokens than there are marks")
            self._mark_of[literal] = mark
            self._literal_of[mark] = literal
        return self._mark_of[literal]


def mark_template(tree: nodes.Template, marks: ControlMarks) -> nodes.Template:
    """Rewrite a parsed template: control literals to marks, loops counted against a budget.

    Constants that are only compared with a text ('</think>' in content) stay as they are.
    """
    _Marker(marks).visit(tree)
    return tree


class _Marker(NodeTransformer):
    def __init__(self, marks: ControlMarks) -> None:
        self._marks = marks

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        node.data = self._marks.mark(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, str):
            node.value = self._marks.mark(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return node  # a truth value: nothing below is ever written

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return node  # likewise

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)  # the index is looked up, never written
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if isinstance(node.node, nodes.Getattr) and node.node.attr in _LOOKS_ONLY:
            node.args[1:] = [self.visit(arg) for arg in node.args[1:]]
            node.node = self.visit(node.node)
            return node
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name in ("replace", "trim"):
            node.args[1:] = [self.visit(arg) for arg in node.args[1:]]
            node.node = self.visit(node.node) if node.node else None
            return node
        return self.generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, LOOP_FILTER, [], [], None, None)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        node.nodes = self._fuse_roles(node.nodes)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node.nodes = self._fuse_roles(node.nodes)
        return self.generic_visit(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        terms = _terms(node)
        first, *rest = self._fuse_roles(terms)
        if [first, *rest] == terms:
            return self.generic_visit(node)
        whole: nodes.Expr = self.visit(first)
        for term in rest:
            whole = nodes.Add(whole, self.visit(term))
        return whole

    def _fuse_roles(self, parts: list[nodes.Expr]) -> list[nodes.Expr]:
        """`'<|' + message.role + '|>'`: the three parts to one filter that knows the token."""
        fused: list[nodes.Expr] = []
        for part in parts:
            fused.append(part)
            if len(fused) >= 3 and (triple := self._role_token(*fused[-3:])):
                fused[-3:] = triple
        return fused

    def _role_token(
        self, left: nodes.Expr, role: nodes.Expr, right: nodes.Expr
    ) -> list[nodes.Expr] | None:
        before, after = _constant(left), _constant(right)
        if not before or not after or not _names_role(role):
            return None
        start = max(before.rfind(opening) for opening in "<[")
        stop = min((at for closing in ">]" if (at := after.find(closing)) >= 0), default=-1) + 1
        if start < 0 or not stop or not self._marks.prepare_roles(before[start:], after[:stop]):
            return None
        edges: list[nodes.Expr] = [nodes.Const(before[start:]), nodes.Const(after[:stop])]
        token = nodes.Filter(role, ROLE_FILTER, edges, [], None, None)
        return [nodes.Const(before[:start]), token, nodes.Const(after[stop:])]


def _terms(node: nodes.Expr) -> list[nodes.Expr]:
    if isinstance(node, nodes.Add):
        return [*_terms(node.left), node.right]
    return [node]


def _constant(node: nodes.Expr) -> str | None:
    if isinstance(node, nodes.TemplateData):
        return node.data
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _names_role(node: nodes.Expr) -> bool:
    """message.role, message['role'] or a variable called role."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return isinstance(node, nodes.Name) and node.name == "role"
