"""``kvalloc.refine``: what is asked, on which prompts, and what the budget profile states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

from kvalloc.allocation.decision import solver_of, to_budget_profile
from kvalloc.allocation.formulation import PosedRequest, formulate
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.engine.contract import ModelFacts
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_scores
from kvalloc.measure.checkpoint import kept_work
from kvalloc.problem import Solver
from kvalloc.problem.registry import options_of
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.tuning.measurement import JointProbes
from kvalloc.tuning.rounds import Point, Search, Settings
from kvalloc.tuning.tasks import chosen_prompts, refinement_prompts


class RefineOptions(RequestOptions, total=False):
    """How to refine, beside the target and limits of `RequestOptions`.

    Attributes
    ----------
    request : Request
        Ready, in place of the keywords of `RequestOptions`.
    rounds, probes, held_out_share, continuation_tokens, seed, time_limit
        See `kvalloc.tuning.rounds.Settings`.
    solver, solver_options
        As in `kvalloc.solve`.
    """

    request: Request
    rounds: int
    probes: int | None
    held_out_share: float
    continuation_tokens: int
    seed: int
    solver: str | Solver
    solver_options: dict[str, Any] | None
    time_limit: float | None


SETTINGS = tuple(field.name for field in fields(Settings))


def refine(
    scores: ScoreProfile | str | Path,
    model: Any,
    tokenizer: Any,
    prompts: Iterable[str | Document | Prompt] | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    model_id: str | None = None,
    **options: Unpack[RefineOptions],
) -> BudgetProfile:
    """Solve on loss curves, measure the whole solution, correct the curves, and solve again.

    Losses of single units do not add up where budgets are small. So the solution's loss is
    measured with all units at their budgets at once, and for each unit what one step to its
    neighbours changes while the others stay. The changes are shrunk towards what all units have in
    common, as far as prompts left out want it (cross-validation), and the problem is solved again
    among the options that this says something about. Prompts that nothing is learnt from choose:
    the round with the least loss on them is kept, and a step that did more harm is tried half as
    far. With ``target_loss`` the fewest bytes are sought at which the loss on those prompts is
    within the target. What is stated in the end is the loss on prompts that were neither learnt
    from nor chosen by.

    Parameters
    ----------
    scores : ScoreProfile, str or Path
        With loss curves, or their file.
    model : transformers.PreTrainedModel
        The model that they were measured on.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    prompts : iterable of str, Document or Prompt, optional
        What is measured on; every prompt counts, running text gives 16 pieces. By default
        what `refinement_prompts` makes for this tokenizer and context.
    output : str or Path, optional
        The budget profile to write. Finished measurements are kept in ``OUTPUT.partial`` until
        then.
    resume : bool
        Go on with what a killed call left there: the numbers are those of an unbroken run.
    progress : callable, optional
        Called with (prompts measured, prompts to measure at most).
    model_id : str, optional
        Instead of what the model's config says.
    **options
        Target and limits as `kvalloc.solve` takes them (``budget="20%"``, ``level="head"``, ...),
        and how to refine: see `RefineOptions`.

    Returns
    -------
    BudgetProfile
        Its `refinement` states predicted and measured loss with intervals, the text, what each
        prompt was for and every round.

    Raises
    ------
    InputError
        If the target is a retention, the score profile holds no loss curves, or prompts are too
        few or too short.
    ModelMismatchError
        If the score profile is of another model.
    InfeasibleError
        If no round's loss on the prompts that choose is within the target.
    SolverError
        If the solver refuses the problem.
    """
    scores, given = load_scores(scores), dict[str, Any](options)
    own = {name: given.pop(name) for name in SETTINGS if name in given}
    settings = Settings(**own)
    named: dict[str, Any] | None = given.pop("solver_options", None)
    solver = solver_of(given.pop("solver", "auto"), named)
    request = refinement_request(given)
    facts = ModelFacts.of(model, model_id)
    scores.shape.require_same_model(facts.shape)
    problem, note = formulate(scores, request), ""
    if prompts is None:
        context = scores.context_tokens
        prompts, note = refinement_prompts(tokenizer=tokenizer, context_tokens=context)
    samples, tasks = chosen_prompts(prompts, tokenizer, scores)
    text = {"text_digest": samples.digest(), "answers_digest": samples.answers_digest()}
    steps = settings.continuation_tokens

    def job() -> dict[str, Any]:
        return {
            **facts.record(),
            **text,
            "refining": request.target.record(),
            "level": request.level,
            "scores": scores.digest,
            "continuation_tokens": steps,
            "probes": settings.probes,  # rounds may be added later
        }

    with kept_work(output, job, resume=resume) as kept:
        run = Search(
            prompts=JointProbes(model, scores, samples, continuation_tokens=steps, kept=kept),
            tasks=tasks,
            settings=settings,
            solver=solver,
            target_loss=request.target.max_loss,
            progress=progress,
        )
        best = run.search(problem)
        about = {**text, "text_description": samples.description, "note": note}
        decided = _profile_of(scores, request, best, solver, named, {**about, **run.summary(best)})
        if kept is not None:
            decided.save(kept.output)
            kept.finish()
    return decided


def _profile_of(
    scores: ScoreProfile,
    request: Request,
    best: Point,
    solver: Solver,
    solver_options: dict[str, Any] | None,
    summary: dict[str, Any],
) -> BudgetProfile:
    """The best round as a budget profile that states how it was found."""
    decided = to_budget_profile(
        scores,
        PosedRequest(request=request, problem=best.problem),
        best.checked,
        solver_name=solver.name,
        solver_options=options_of(solver) if solver_options is None else solver_options,
    )
    return decided.replace(predicted_loss=summary["predicted_loss"], refinement=summary)


def refinement_request(asked: dict[str, Any]) -> Request:
    """The request of a refinement: by loss, whatever the size.

    Raises
    ------
    InputError
        If there is no such keyword, or the request is not about loss.
    """
    asked = dict(asked)
    ready = asked.pop("request", None)
    request = ready if isinstance(ready, Request) else Request.parse(**asked)
    by_retention = request.target.needed_value is not None and request.target.max_loss is None
    if by_retention or request.objective not in (None, "loss"):
        raise InputError(
            "refining measures loss, so it goes with a size or with a target loss; leave out the "
            "retention and the objective"
        )
    if request.weights is not None:
        raise InputError("refining measures what units weigh; leave out the weights")
    return replace(request, objective="loss")
