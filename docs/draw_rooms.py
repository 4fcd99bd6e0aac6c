"""Draws docs/rooms.png: which room of kvalloc imports which, read from the code.

Run it from the project's root: ``.venv/bin/python docs/draw_rooms.py``. An arrow leads from a room
to one that it imports, type-checking imports included; an arrow that follows from two others is
left out (transitive reduction). The tools that every room may use (``errors``, ``files``,
``shape``, ``units``) are left out too.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import grimp
import matplotlib as mpl
import networkx as nx

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "rooms.png"
TOOLS = {"errors", "files", "shape", "units", "profiles", "data"}


def room_imports() -> nx.DiGraph:
    """Rooms of ``kvalloc/`` and an edge from each room to every room that it imports."""
    modules = grimp.build_graph("kvalloc", cache_dir=None)
    rooms = {name.split(".")[1] for name in modules.modules if name.count(".") >= 1} - TOOLS
    graph = nx.DiGraph()
    graph.add_nodes_from(rooms)
    for importer in modules.modules:
        for imported in modules.find_modules_directly_imported_by(importer):
            pair = [name.split(".")[1] if "." in name else "" for name in (importer, imported)]
            if pair[0] != pair[1] and {*pair} <= rooms:
                graph.add_edge(*pair)
    return graph


def routes(graph: nx.DiGraph) -> tuple[list[list[str]], dict[tuple[str, str], list[str]]]:
    """Rooms in rows, users above what they use, and the stops of every arrow, one in each row.

    A stop that is not a room keeps a place in its row, so that no arrow runs through a box. Rows
    are ordered by the mean place of the neighbours, from above and from below in turns.
    """
    rows = [sorted(row) for row in nx.topological_generations(graph.reverse())][::-1]
    depth = {room: place for place, row in enumerate(rows) for room in row}
    stops = nx.Graph()
    arrows = {}
    for user, used in sorted(graph.edges):
        between = [f"{user} {used} {place}" for place in range(depth[user] + 1, depth[used])]
        for place, stop in enumerate(between, depth[user] + 1):
            rows[place].append(stop)
        arrows[user, used] = [user, *between, used]
        nx.add_path(stops, arrows[user, used])
    for sweep in range(24):
        numbered = list(enumerate(rows))
        for place, row in numbered if sweep % 2 else reversed(numbered):
            beside = rows[place - 1] if sweep % 2 else (rows[place + 1 :] or [[]])[0]
            where = {stop: (number + 0.5) / len(beside) for number, stop in enumerate(beside)}
            own = {stop: (number + 0.5) / len(row) for number, stop in enumerate(row)}
            near = {stop: [where[one] for one in stops[stop] if one in where] for stop in row}
            row.sort(key=lambda stop: fmean(near[stop] or [own[stop]]))
    return rows, arrows


def draw(graph: nx.DiGraph, path: Path) -> None:
    """Draw the rooms and the arrows between them.

    Parameters
    ----------
    graph : networkx.DiGraph
        Without circles.
    path : Path
        The PNG file to write.
    """
    rows, arrows = routes(nx.transitive_reduction(graph))
    place = {
        stop: ((number + 0.5) / len(row), -float(depth))
        for depth, row in enumerate(rows)
        for number, stop in enumerate(row)
    }
    figure, axes = plt.subplots(figsize=(8, 8), dpi=110, layout="constrained")
    axes.set_xlim(0, 1)
    axes.set_ylim(0.5 - len(rows), 0.5)
    axes.set_axis_off()
    box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "0.2"}
    texts = {
        room: axes.text(*place[room], room, ha="center", va="center", fontsize=11, bbox=box)
        for room in graph
    }
    figure.canvas.draw()  # gives the boxes their sizes, which the arrows end at
    for (_, used), stops in arrows.items():
        line = [place[stop] for stop in stops]
        if len(line) > 2:
            axes.plot(*zip(*line[:-1], strict=True), color="0.6", linewidth=1, zorder=1)
        axes.add_patch(
            FancyArrowPatch(
                line[-2],
                line[-1],
                arrowstyle="-|>",
                mutation_scale=12,
                patchB=texts[used].get_bbox_patch(),
                shrinkA=0,
                shrinkB=0,
                color="0.6",
                zorder=1,
            )
        )
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Draw the picture, after checking that there is no circle."""
    graph = room_imports()
    circles = [room for room in nx.strongly_connected_components(graph) if len(room) > 1]
    if circles:
        raise SystemExit(f"rooms that import each other: {circles}")
    draw(graph, PICTURE)
    print(f"{PICTURE.relative_to(ROOT)}: {len(graph)} rooms, {graph.number_of_edges()} imports")


if __name__ == "__main__":
    main()
