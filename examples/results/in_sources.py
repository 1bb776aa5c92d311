"""The table of what ran in the engines' own public sources."""

from selection import document
from sources import ENGINES
from writing import table


def in_sources() -> str:
    """A row an engine: its sources' commits, what of it ran, what came out, and the command."""
    rows: list[tuple[str, ...]] = []
    for row in document("engines") or []:
        sources = [
            f"{repository.partition('/')[2]} {version}, [{commit[:7]}]"
            f"(https://github.com/{repository}/tree/{commit})"
            for repository, (version, commit) in row["sources"].items()
        ]
        error = row["largest_error"]
        result = f"{row['equal']} of {row['cases']} cases equal, {row['new_tokens']} tokens"
        result += "" if error is None else f"; logits within {error:.1e}"
        ranks = ", ".join(map(str, row["ranks"]))
        command = f'`{ENGINES} --engine "{row["engine"]}"`'
        rows.append((row["engine"], "<br>".join(sources), row["ran"], ranks, result, command))
    return table(["engine", "sources", "what ran", "ranks", "tokens", "command"], rows)
