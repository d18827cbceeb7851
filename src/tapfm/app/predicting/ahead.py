"""What is begun before it is known what is to be done: processes start, and weights are loaded while tiles are laid."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass

from tapfm.app.evaluating.member_predictions import load_with_encoder
from tapfm.app.evaluating.members import Evaluated
from tapfm.app.predicting.loading import Computing
from tapfm.app.tile_slides import tile_one
from tapfm.model import SlideModel
from tapfm.processes import Crew, answer_items
from tapfm.tiles.stream import serve_pieces


@dataclass
class Ahead:
    """Who will lay tiles, who will read them, and the weights; nothing of it where all may be done already."""

    layers: Crew
    readers: Crew
    thread: ThreadPoolExecutor
    resume: bool
    weights: Future[list[SlideModel]] | None = None

    def load(self, evaluated: Evaluated, computing: Computing, slides: int) -> None:
        """Begin to load the members; what goes wrong is told to who asks for the weights.

        Tiles of many slides take long to lay: memory would wait for them, so that nothing is begun.
        """
        if slides > max(1, computing.workers):
            self.readers.close()
        elif not self.resume:
            self.weights = self.thread.submit(
                lambda: [load_with_encoder(member, computing.device) for member in evaluated.members]
            )


@contextmanager
def begun_ahead(workers: int, *, lays: bool, resume: bool) -> Iterator[Ahead]:
    """Begin with it, and end what nobody took, whatever happens."""
    with (
        closing(Crew(1 if lays and not resume else 0, answer_items, tile_one)) as layers,
        closing(Crew(0 if resume else workers, serve_pieces)) as readers,
        ThreadPoolExecutor(1, "weights") as thread,
    ):
        yield Ahead(layers, readers, thread, resume)
