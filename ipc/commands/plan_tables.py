"""The results of ``odriver plan``, as tables on stdout."""

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from engine.planner.chip_plan import ChipPlan
from engine.planner.compiled_function import CompiledFunction
from ipc.process.tables import facts_table, numbers_table, plain, show

ACCEPTANCES = (0.0, 0.5, 0.7, 0.9)
"""Shares of drafts that are accepted, in the table of what drafts are worth."""


def show_plan(plan: ChipPlan) -> None:
    """Print what a chip holds, what was compiled for it, and how long its steps take."""
    show(_plan_memory(plan), _plan_steps("Steps", plan.steps))
    if plan.adapted_steps:
        show(_plan_steps("Steps with adapters", plan.adapted_steps))
    show(_plan_others(plan), _plan_decode(plan), _plan_prompts(plan))
    if plan.verified:
        show(_plan_verified(plan))


def _plan_memory(plan: ChipPlan) -> Table:
    table = facts_table(
        f"{plan.model} on {plan.tensor_parallel_size} of the {plan.chips} {plan.chip} of {plan.topology}"
    )
    table.add_row("weights a chip", f"{decimal(plan.weights)} in {plan.form}")
    if plan.draft_weights:
        table.add_row("draft model a chip", decimal(plan.draft_weights))
    if plan.adapters:
        table.add_row("adapters a chip", f"{decimal(plan.adapters)}: {plan.max_loras} slots, and one on its way")
    table.add_row("scratch", decimal(plan.scratch))
    if plan.earlier:
        table.add_row("earlier requests", f"{decimal(plan.earlier)}: their tokens, beside those of each slot")
    table.add_row("pages", f"{decimal(plan.pages)}: {plan.num_pages:,} of {plan.page_size} tokens")
    if plan.host_pages:
        seconds = f"{1e3 * plan.host_page_seconds:.2g} ms"
        states = f" and {plan.host_states:,} recurrent states" if plan.host_states else ""
        table.add_row(
            "host cache",
            f"{decimal(plan.host_bytes)}: {plan.host_pages:,} pages{states}; a page comes back in {seconds}",
        )
    if plan.num_states:
        table.add_row("recurrent states", f"{decimal(plan.states)}: {plan.num_states:,} slots")
    table.add_row("may be used", f"{decimal(plan.budget)} of {decimal(plan.hbm)}")
    table.add_row("context", f"{plan.context_tokens:,} tokens in all, {plan.max_model_len:,} a sequence")
    table.add_row("compiled", f"{len(plan.functions)} functions in {plan.compile_seconds:.0f} s")
    return table


def _plan_steps(what: str, steps: list[CompiledFunction]) -> Table:
    headings = ("tokens", "seconds", "scratch", "exchanges a layer", "and besides", "copies, gathers")
    table = numbers_table(f"{what}, as they are compiled", *headings)
    for step in steps:
        layer = [f"{one.per_layer:g} {one.kind}" for one in step.exchanges if one.per_layer]
        besides = [f"{one.besides} {one.kind}" for one in step.exchanges if one.besides]
        table.add_row(
            f"{step.size:,}", f"{step.compile_seconds:.1f}", decimal(step.scratch_bytes), ", ".join(layer) or "none",
            ", ".join(besides) or "none",
            _lines(*step.copies, *step.gathers) or ("none" if step.readable else "not known"),
        )  # fmt: skip
    return table


def _plan_others(plan: ChipPlan) -> Table:
    table = numbers_table("Between steps, for most rows", "", "rows", "seconds", "scratch", "gathers of logits")
    for one in plan.others:
        gathers = _lines(*one.gathers) or ("none" if one.readable else "not known")
        table.add_row(one.name, f"{one.size}", f"{one.compile_seconds:.1f}", decimal(one.scratch_bytes), gathers)
    return table


def _plan_decode(plan: ChipPlan) -> Table:
    headings = ["sequences", "must read", "reads", "writes", "ms to move", "to compute", "to exchange", "tokens/s"]
    if has_experts := any(step.experts_read is not None for step in plan.decode):
        headings.append("experts read (estimate)")
    table = numbers_table(
        f"Decoding sequences of {plan.tokens_a_sequence:,} tokens, at best; bytes of a chip", *headings
    )
    for step in plan.decode:
        seconds = step.bandwidth_seconds, step.compute_seconds, step.exchange_seconds
        table.add_row(
            f"{step.sequences:,}", decimal(step.bytes_needed), decimal(step.bytes_read), decimal(step.bytes_written),
            *(f"{1e3 * each:.2f}" for each in seconds), f"{step.tokens_per_second:,.0f}",
            *([f"{step.experts_read or 0:.0%}"] if has_experts else []),
        )  # fmt: skip
    return table


def _plan_prompts(plan: ChipPlan) -> Table:
    headings = ("tokens", "reads", "writes", "ms to move", "to compute", "to exchange", "tokens/s")
    table = numbers_table(f"Prompts of {plan.tokens_a_sequence:,} tokens, at best; bytes of a chip", *headings)
    for step in plan.prompts:
        seconds = step.bandwidth_seconds, step.compute_seconds, step.exchange_seconds
        table.add_row(
            f"{step.tokens:,}", decimal(step.bytes_read), decimal(step.bytes_written),
            *(f"{1e3 * each:.2f}" for each in seconds), f"{step.tokens_per_second:,.0f}",
        )  # fmt: skip
    return table


def _plan_verified(plan: ChipPlan) -> Table:
    """The decoding steps again, with drafts to verify, and what that is worth."""
    drafts, has_model = plan.verified[0].drafts, plan.draft_weights > 0
    plain = {step.sequences: step.tokens_per_second for step in plan.decode}
    table = numbers_table(
        f"The same with {drafts} drafts a sequence, and times the tokens/s if so many are accepted",
        *("sequences", "tokens", "reads", "ms to move", "to compute", "to exchange"),
        *(["to draft"] if has_model else []),
        *(f"{acceptance:.0%}" for acceptance in ACCEPTANCES),
    )
    for step in plan.verified:
        seconds = step.bandwidth_seconds, step.compute_seconds, step.exchange_seconds
        table.add_row(
            f"{step.sequences:,}", f"{step.sequences * (1 + drafts):,}", decimal(step.bytes_read),
            *(f"{1e3 * each:.2f}" for each in (*seconds, *([step.drafting_seconds] if has_model else []))),
            *(f"{step.tokens_per_second_at(each) / plain[step.sequences]:.2f}" for each in ACCEPTANCES),
        )  # fmt: skip
    return table


def _lines(*texts: str) -> Text:
    return Text("\n").join(map(plain, texts))
