"""Fakes of the functions of ``fused_lamb`` that return something."""

from __future__ import annotations

from opkiln.optimizing.references import fake_plan, fake_planned_step

fused_lamb_plan = fake_plan
fused_lamb_planned_ = fake_planned_step
