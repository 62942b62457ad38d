"""One module per kernel template: from a spec to its plan."""

from __future__ import annotations

from codegen.errors import SpecError
from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.plans import attention_sm89, attention_sm90a, bsr_spmm_sm90a, bsr_spmm_sm90a_narrow, bsr_spmm_wmma
from codegen.spec import AttentionSpec, Spec


def plan_for(named: NamedSpec) -> Plan:
    """Work out the plan of a spec.

    Raises:
        SpecError: when the spec cannot work on its architecture, with the field, the numbers and the place in the file.
    """
    try:
        return _dispatch(named.spec, named.stem)
    except SpecError as error:
        raise named.located(error) from None


def _dispatch(spec: Spec, stem: str) -> Plan:
    if isinstance(spec, AttentionSpec):
        attention = attention_sm90a.plan if spec.mma == "wgmma" else attention_sm89.plan
        return attention(spec, stem)
    if spec.mma != "wgmma":
        return bsr_spmm_wmma.plan(spec, stem)
    bsr_spmm = bsr_spmm_sm90a_narrow if spec.block.rows in bsr_spmm_sm90a_narrow.SIZES else bsr_spmm_sm90a
    return bsr_spmm.plan(spec, stem)
