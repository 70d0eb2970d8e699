"""An import-linter contract: these modules may import those, and nothing else of HAWK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


class MayImport(Contract):  # type: ignore[misc]
    """`modules` (packages, with all below them) may import each other, `allowed` and nothing else of HAWK's.

    Only direct imports count: what an allowed module imports in turn has a contract of its own.
    """

    modules = fields.SetField(subfield=fields.StringField())
    allowed = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        inside = sorted(m for m in graph.modules if _within(m, self.modules))
        permitted = set(self.modules) | set(self.allowed or ())
        broken: list[dict[str, object]] = []
        for importer in inside:
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if imported.startswith("hawk") and not _within(imported, permitted):
                    broken += graph.get_import_details(importer=importer, imported=imported)
        return ContractCheck(kept=not broken, metadata={"broken": broken, "seen": len(inside)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for fault in check.metadata["broken"]:
            output.print_error(
                f"{fault['importer']} imports {fault['imported']} (line {fault['line_number']})", bold=False
            )


def _within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)
