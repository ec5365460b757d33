"""Fakes of the functions of ``fused_adam`` that return something."""

from __future__ import annotations

from opkiln.optimizing.references import fake_plan, fake_planned_step

fused_adam_plan = fake_plan
fused_adam_planned_ = fake_planned_step
