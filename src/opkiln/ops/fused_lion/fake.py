"""Fakes of the functions of ``fused_lion`` that return something."""

from __future__ import annotations

from opkiln.optimizing.references import fake_plan, fake_planned_step

fused_lion_plan = fake_plan
fused_lion_planned_ = fake_planned_step
