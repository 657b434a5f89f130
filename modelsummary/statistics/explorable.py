"""``ExplorableTree``: a tree to look at: in a page, in Google's Model Explorer, in pictures, beside another one."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from modelsummary.devices.roofline import dtype_of
from modelsummary.errors import InputError
from modelsummary.statistics.layer_tree import LayerTree

if TYPE_CHECKING:  # imported on first use
    from modelsummary.memory.estimate import MemoryEstimate
    from modelsummary.parallel.plan import ParallelPlan
    from modelsummary.split import Stages
    from modelsummary.views.diff import ModelDiff
    from modelsummary.views.explorer.page import Page
    from modelsummary.views.flow import Dataflow
    from modelsummary.views.plot import Pictures

__all__ = ["ExplorableTree"]


class ExplorableTree(LayerTree):
    """A tree with the explorer, pictures and the differences to another tree."""

    def explore(
        self,
        path: str | PathLike[str] | None = None,
        *,
        compare: ExplorableTree | None = None,
        memory: MemoryEstimate | None = None,
        stages: Stages | None = None,
        plan: ParallelPlan | None = None,
    ) -> Page:
        """Return one HTML page to look at the model: it needs no network, and opens from disk.

        The page has the tree with search, the graph by levels (modules open down to operators; equal blocks are one
        with a multiplier), the facts of what is selected, and the same selection as treemap, icicle, roofline and
        memory timeline, coloured by any figure. A notebook shows it in a frame; ``open()`` shows it in the browser.

        The graph has edges where the dataflow is known: for live models, which are recorded again as for ``split``,
        and for ONNX and ``.pt2`` files. For others, it shows the modules of each level.

        Args:
            path: path of a file to write the page to as well.
            compare: statistics of another model, taken as the later one, shown beside this one with differences
                marked.
            memory: result of ``memory()`` of this model, for the timeline.
            stages: result of ``split`` on this model; nodes have the colours of their stages.
            plan: result of ``parallel_plan`` on this model; modules have the colours of their sharding.

        Raises:
            InputError: an argument is unusable or belongs to another model, or the file cannot be written.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU()), (1, 2)).explore().html[:15]
        '<!DOCTYPE html>'
        """
        from modelsummary.capture.run import no_collection
        from modelsummary.views.explorer.data import VERSION, Explored, diff_data, model_data
        from modelsummary.views.explorer.page import page_of

        if compare is not None and not isinstance(compare, ExplorableTree):
            raise InputError(f"compare must be the Statistics of a model, got {compare!r:.80}")
        with no_collection():  # which takes a third of the time
            models = [Explored(self.root, self._dataflow(stages), memory=memory, plan=plan)]
            difference = None
            if compare is not None:
                models.append(Explored(compare.root, compare._dataflow()))
                difference = diff_data(*models)
            data = {"version": VERSION, "models": [model_data(model) for model in models], "diff": difference}
            page = page_of(data, " and ".join(model.root.class_name for model in models))
        if path is not None:
            page.save(path)
        return page

    def to_model_explorer(self, path: str | PathLike[str]) -> list[Path]:
        """Write files for Google's Model Explorer: the graph, and beside it one file of node data per figure.

        Nodes are operators and the smallest calls of modules, with edges as in ``explore``; namespaces are the modules
        around them. ``net.json`` comes with ``net.macs.json``, ``net.params.json`` and so on; open them by
        ``model-explorer net.json --node_data_paths net.macs.json``.

        Returns:
            The paths, the graph first.

        Raises:
            InputError: a file cannot be written.
        """
        from modelsummary.views.explorer.data import Explored
        from modelsummary.views.model_explorer import write_files

        return write_files(Explored(self.root, self._dataflow()), path)

    @property
    def plot(self) -> Pictures:
        """The plots with matplotlib, such as ``stats.plot.treemap(by="macs")``; see ``Pictures`` for all of them."""
        from modelsummary.views.plot import Pictures

        return Pictures(self.root, lambda: dtype_of(self.root))

    def diff(self, other: ExplorableTree) -> ModelDiff:
        """Return the differences to another model: modules added, removed, renamed and changed, with their figures.

        Figures are a module's own, without its submodules, so they add up to the totals. Times are shown if both models
        were measured, and do not count as a difference. Without an input, MACs and shapes are not compared.

        Args:
            other: statistics of the other model, taken as the later one.

        Returns:
            The differences: they print as a table, and are true if there are any.

        Raises:
            InputError: ``other`` is not a ``ModelStatistics``.
        """
        from modelsummary.views.diff import diff_trees

        if not isinstance(other, ExplorableTree):
            raise InputError(
                f"other must be the Statistics of a model, got {type(other).__name__}: {other!r:.80}; "
                "pass Statistics(model, input_data)"
            )
        return diff_trees(self.root, other.root)

    def _dataflow(self, stages: Stages | None = None) -> Dataflow:
        """Return what is known of the dataflow."""
        from modelsummary.views.flow import Dataflow

        if stages is not None:
            raise InputError("stages need the live model that was split; pass them to the explore of its Statistics")
        return Dataflow()
