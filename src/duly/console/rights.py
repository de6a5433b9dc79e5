"""Who sees and does what: the engine's pages by its two roles, a section with roles of its own by those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duly.app import Section
from duly.console.routes import MOUNT, FormPage
from duly.console.sessions import ROLES, Session
from duly.errors import Forbidden, Invalid
from duly.operate.actions import ACTIONS, Action, find_action

# The first parts of the engine's own addresses: a section of such a name would lend its roles to them.
TAKEN = frozenset({
    "jobs", "schedules", "history", "dead-letters", "outbox", "events", "entity", "search", "audit", "alerts",
    "processes", "webhooks", "actions", "sign-in", "sign-out", "signed-out", "theme", "static", "live",
})  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A line of the navigation; ``key`` opens it after ``g``."""

    title: str
    path: str
    key: str = ""


class Rights:
    """What the sections ask for, and what each person may do with them."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._sections = {section.name: section for section in sections}
        self._owners: dict[str, Section] = {}
        self._actions: dict[str, Action] = {}
        self._forms: dict[str, FormPage] = {}
        for section in sections:
            if section.name in TAKEN:
                raise Invalid(f"{section.name!r} cannot name a section: it is a page of the engine")
            self._forms |= getattr(section.router, "forms", {})
            for action in section.actions:
                if action.name in self._actions or action.name in ACTIONS:
                    raise Invalid(f"the action {action.name!r} is registered already")
                self._owners[action.name], self._actions[action.name] = section, action
        self.roles = ROLES.union(*(section.roles for section in sections))
        """Whoever has none of these has no business here."""

    def find_action(self, name: str) -> Action:
        """A section's action, or one of the engine's."""
        return self._actions.get(name) or find_action(name)

    def asks_first(self, name: str) -> bool:
        """Whether its button leads to a page that asks why. A section does what can be undone at once."""
        return self.find_action(name).is_destructive or not self.is_of_section(name)

    def is_of_section(self, name: str) -> bool:
        """Whether this is an action of a section."""
        return name in self._owners

    def add_forms(self, forms: Mapping[str, FormPage]) -> None:
        """The pages that have the forms of the engine's own actions."""
        self._forms = {**forms, **self._forms}

    def find_form(self, name: str) -> FormPage | None:
        """The page that shows the form of an action again, with what is wrong."""
        return self._forms.get(name)

    def section_at(self, path: str) -> Section | None:
        """The section that an address belongs to; None for the engine's own pages."""
        return self._sections.get(path.removeprefix(MOUNT).lstrip("/").partition("/")[0])

    def may_see(self, session: Session, section: Section | None) -> bool:
        """Whether a person may look."""
        if section is None:
            return session.may_look
        return not session.roles.isdisjoint(section.roles) or (session.may_look and not section.is_closed)

    def may_act(self, session: Session, section: Section | None) -> bool:
        """Whether a person may change something."""
        if section is None or not section.roles:
            return session.may_act
        return not session.roles.isdisjoint(section.roles)

    def may_do(self, session: Session, name: str) -> bool:
        """Whether a person may do this."""
        return self.may_act(session, self._owners.get(name))

    def sees(self, session: Session, name: str) -> bool:
        """Whether a person may look at the section of this name, if there is one."""
        section = self._sections.get(name)
        return section is not None and self.may_see(session, section)

    def check_see(self, session: Session, section: Section | None) -> None:
        """Forbidden, unless they may look."""
        if not self.may_see(session, section):
            needed = "ADMINISTRATOR or OPERATOR" if section is None else " or ".join(section.roles)
            raise Forbidden(f"this page is not for you: it needs the role {needed}")

    def check_act(self, session: Session, section: Section | None) -> None:
        """Forbidden, unless they may change something."""
        if not self.may_act(session, section):
            needed = " or ".join(section.roles) if section is not None and section.roles else "ADMINISTRATOR"
            raise Forbidden(f"you may look, but not change anything: this needs the role {needed}")

    def check_do(self, session: Session, name: str) -> None:
        """Forbidden, unless they may do this."""
        self.check_act(session, self._owners.get(name))

    def home(self, session: Session | None) -> str:
        """The first page that a person may see."""
        if session is None or session.may_look:
            return MOUNT
        return next((f"{MOUNT}/{one.name}" for one in self._sections.values() if self.may_see(session, one)), MOUNT)

    def groups(self, session: Session) -> dict[str, list[Entry]]:
        """The sections that a person may see, as the navigation shows them."""
        groups: dict[str, list[Entry]] = {}
        for section in self._sections.values():
            if self.may_see(session, section):
                groups.setdefault(section.group, []).append(Entry(section.title, f"/{section.name}"))
        return groups
