"""Adopting a live module: no second copy, nothing of it changed, refused when it is not plain."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nanoserve_core.errors import UnsupportedOption
from nanoserve_core.layers.linear import Linear, SplitLinear
from nanoserve_core.models.adopt import Adoption
from nanoserve_core.models.eligibility import Eligibility, ineligible_reason, spec_of
from tests.nanoserve_core.random_qwen3 import frozen, random_model, random_tokens, reference_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor


def test_trainable_module_is_left_where_it_is_and_shared() -> None:
    model = random_model()
    pointers = pointers_of(model)

    weights = Adoption(model).weights

    attention = model.model.layers[0].self_attn
    assert pointers_of(model) == pointers
    assert isinstance(weights.layers[0].qkv, SplitLinear)
    assert weights.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert weights.layers[0].o.weight.data_ptr() == attention.o_proj.weight.data_ptr()
    assert weights.layers[0].q_norm.data_ptr() == attention.q_norm.weight.data_ptr()


def test_frozen_module_is_fused_and_shares_every_tensor() -> None:
    model = frozen(random_model(attention_bias=True))

    weights = Adoption(model).weights

    for layer, adopted in zip(model.model.layers, weights.layers, strict=True):
        projections = [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]
        assert isinstance(adopted.qkv, Linear)
        assert adopted.qkv.bias is not None
        assert_is_made_of(adopted.qkv.weight, [each.weight for each in projections])
        assert_is_made_of(adopted.qkv.bias, [each.bias for each in projections])
        assert isinstance(adopted.gate_up, Linear)
        halves = [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
        assert_is_made_of(adopted.gate_up.weight, halves)
        assert adopted.down.weight.data_ptr() == layer.mlp.down_proj.weight.data_ptr()


def test_fusing_takes_no_memory_of_its_own() -> None:
    model = frozen(random_model())
    before = storage_nbytes(model)

    adoption = Adoption(model)

    assert storage_nbytes(model) == before
    adopted = {adoption.weights.layers[0].qkv.weight.untyped_storage().data_ptr()}
    assert adopted <= {each.untyped_storage().data_ptr() for each in model.parameters()}


def test_fusing_keeps_parameters_names_values_and_outputs() -> None:
    model = frozen(random_model())
    ids, values = [id(each) for each in model.parameters()], copy.deepcopy(model.state_dict())
    logits = reference_logits(model, random_tokens(9))

    Adoption(model).close()

    assert [id(each) for each in model.parameters()] == ids
    assert model.state_dict().keys() == values.keys()
    assert all(torch.equal(each, values[name]) for name, each in model.state_dict().items())
    torch.testing.assert_close(reference_logits(model, random_tokens(9)), logits)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_nothing_else_of_the_module_changes(is_frozen: bool) -> None:
    model = random_model().requires_grad_(not is_frozen).train()
    attributes, config = attributes_of(model), copy.deepcopy(model.config.to_dict())

    Adoption(model).close()

    assert attributes_of(model) == attributes
    assert model.config.to_dict() == config
    assert model.training
    assert all(each.requires_grad is not is_frozen for each in model.parameters())


def test_second_adoption_uses_what_the_first_has_fused() -> None:
    model = frozen(random_model())
    first = Adoption(model)
    pointers = pointers_of(model)

    second = Adoption(model)

    assert pointers_of(model) == pointers
    fused = [each.weights.layers[0].qkv.weight for each in (first, second)]
    assert fused[0].data_ptr() == fused[1].data_ptr()
    assert fused[0].shape == fused[1].shape
    assert not first.refresh()


def test_module_made_under_inference_mode_is_shared_but_not_fused() -> None:
    with torch.inference_mode():
        model = frozen(random_model())

    adoption = Adoption(model)

    assert isinstance(adoption.weights.layers[0].qkv, SplitLinear)
    assert adoption.refresh() is False


def test_tied_head_is_the_embedding() -> None:
    weights = Adoption(random_model(tie_word_embeddings=True)).weights

    assert weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()


def test_fused_module_trains_and_saves_as_before(tmp_path: Path) -> None:
    model = frozen(random_model())
    adoption = Adoption(model)
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    model(torch.tensor([random_tokens(6)]), labels=torch.tensor([random_tokens(6)])).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)

    attention = model.model.layers[0].self_attn
    assert_is_made_of(
        adoption.weights.layers[0].qkv.weight,
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
    )
    again = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again.model.layers[0].self_attn.k_proj.weight, attention.k_proj.weight)


def test_storage_that_moved_is_adopted_anew() -> None:
    model = frozen(random_model())
    adoption = Adoption(model)
    old = adoption.weights

    model.to(torch.bfloat16)
    is_new = adoption.refresh()

    assert is_new
    assert adoption.weights is not old
    assert adoption.weights.embedding.dtype == torch.bfloat16
    assert adoption.weights.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert adoption.epoch == 1
    assert not adoption.refresh()


def clip_gradients(model: Qwen3ForCausalLM) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def load_own_state(model: Qwen3ForCausalLM) -> None:
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()})


@pytest.mark.parametrize(
    "operation",
    [
        lambda model: model.to("cpu"),
        lambda model: model.float(),
        lambda model: model.share_memory(),
        lambda model: model.resize_token_embeddings(250),
        lambda model: copy.deepcopy(model),
        clip_gradients,
        load_own_state,
    ],
    ids=["to", "float", "share_memory", "resize", "deepcopy", "clip", "load_state_dict"],
)
def test_operation_leaves_fused_weights_shared(
    operation: Callable[[Qwen3ForCausalLM], object],
) -> None:
    model = frozen(random_model())
    adoption = Adoption(model)

    operation(model)
    adoption.refresh()

    attention, qkv = model.model.layers[0].self_attn, adoption.weights.layers[0].qkv
    assert isinstance(qkv, Linear)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert_is_made_of(qkv.weight, [each.weight for each in projections])
    assert adoption.weights.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    adoption.close()


def test_module_with_one_trainable_part_is_not_fused_at_the_next_adoption() -> None:
    model = frozen(random_model())
    adoption = Adoption(model)
    model.lm_head.requires_grad_(True)

    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    adoption.refresh()

    assert isinstance(adoption.weights.layers[0].qkv, SplitLinear)


def test_frequencies_are_those_of_the_live_module() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    model = random_model(rope_parameters=yarn)

    rotary = Adoption(model).weights.rotary

    assert rotary.inv_freq.data_ptr() == model.model.rotary_emb.inv_freq.data_ptr()
    assert rotary.attention_scaling == model.model.rotary_emb.attention_scaling > 1


def test_adoption_does_not_keep_the_module_alive() -> None:
    model = random_model()
    adoption = Adoption(model)
    reference = weakref.ref(model)

    del model
    gc.collect()

    assert reference() is None
    assert adoption.refresh() is False
    assert adoption.weights.norm.isfinite().all()


def test_spec_of_a_module_has_its_dtype_and_all_end_ids() -> None:
    model = random_model().to(torch.bfloat16)
    model.generation_config.eos_token_id = [3, 4]

    spec = spec_of(model)

    assert spec.dtype == torch.bfloat16
    assert spec.eos_token_ids == (3, 4, 7)


def test_plain_module_is_eligible_in_eval_and_train_mode() -> None:
    model = random_model(attention_bias=True)

    assert ineligible_reason(model.eval()) is None
    assert ineligible_reason(model.train()) is None


def test_hooks_that_transformers_installs_for_itself_are_no_obstacle() -> None:
    model = random_model()
    model(torch.tensor([[1, 2]]), output_hidden_states=True, output_attentions=True)
    assert any(vars(each)["_forward_hooks"] for each in model.modules())

    assert ineligible_reason(model) is None


@pytest.mark.parametrize("form", ["decorated", "bare", "compiled"])
def test_own_method_kept_on_the_instance_is_no_obstacle(form: str) -> None:
    model = random_model()
    forward = type(model).forward

    model.forward = MethodType(inspect.unwrap(forward) if form == "bare" else forward, model)
    if form == "compiled":
        model.forward = torch.compile(model.forward, backend="eager")

    assert ineligible_reason(model) is None


TRL_HEAD = """
def add(original_forward):
    def _fused_forward(self, *args, fused_lm_head=False, **kwargs):
        return original_forward(*args, **kwargs)
    return _fused_forward
"""


@pytest.mark.parametrize("is_plain_inside", [True, False])
def test_head_that_trl_adds_is_as_good_as_what_it_stands_around(is_plain_inside: bool) -> None:
    model = random_model()
    names: dict[str, Any] = {"__name__": "trl.trainer.utils"}  # Any: what runs in a module
    exec(TRL_HEAD, names)

    inner = model.forward if is_plain_inside else lambda **_: None
    model.forward = MethodType(names["add"](inner), model)

    assert (ineligible_reason(model) is None) == is_plain_inside


def test_subclass_that_keeps_forward_is_eligible() -> None:
    class Mine(Qwen3ForCausalLM):
        """A user's class with methods of its own."""

    model = random_model()
    model.__class__ = Mine

    assert ineligible_reason(model) is None


def unusual(name: str) -> Callable[[Callable[[Qwen3ForCausalLM], object]], Any]:
    """Collects changes that make a module one we must not stand in for, with the reason's words."""

    def collect(change: Callable[[Qwen3ForCausalLM], object]) -> object:
        return pytest.param(change, name, id=getattr(change, "__name__", name))

    return collect


class LoraLinear(nn.Module):
    """Stands for an adapter's layer around a linear one: it even has a ``weight``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        """The base weight, without the adapter."""
        return self.base.weight


class QuantisedLinear(nn.Linear):
    """Stands for bitsandbytes' classes, which are `nn.Linear` by inheritance."""


@unusual("q_proj is a .*LoraLinear")
def adapter_around_a_layer(model: Qwen3ForCausalLM) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = LoraLinear(attention.q_proj)


@unusual("down_proj is a .*QuantisedLinear")
def subclass_of_linear(model: Qwen3ForCausalLM) -> None:
    model.model.layers[1].mlp.down_proj.__class__ = QuantisedLinear


@unusual("input_layernorm is a .*LayerNorm")
def other_norm(model: Qwen3ForCausalLM) -> None:
    model.model.layers[0].input_layernorm = nn.LayerNorm(64)


@unusual("forward of model.layers.0.mlp is replaced")
def forward_on_an_instance(model: Qwen3ForCausalLM) -> None:
    model.model.layers[0].mlp.forward = lambda x: x


@unusual("forward of the model is replaced")
def forward_on_the_model(model: Qwen3ForCausalLM) -> None:
    model.forward = lambda **_: None


@unusual("forward of model.layers.0.mlp is replaced")
def forward_of_another_instance(model: Qwen3ForCausalLM) -> None:
    model.model.layers[0].mlp.forward = model.model.layers[1].mlp.forward


@unusual("model.layers.1 has forward hooks")
def forward_hook(model: Qwen3ForCausalLM) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


@unusual("lm_head has forward hooks")
def forward_pre_hook(model: Qwen3ForCausalLM) -> None:
    model.lm_head.register_forward_pre_hook(lambda *_: None)


@unusual("lm_head has parametrizations")
def parametrization(model: Qwen3ForCausalLM) -> None:
    nn.utils.parametrizations.orthogonal(model.lm_head)


@unusual("several kinds .*bfloat16.*float32")
def mixed_dtypes(model: Qwen3ForCausalLM) -> None:
    model.lm_head.to(torch.bfloat16)


@unusual("parameters are torch.float64")
def double_precision(model: Qwen3ForCausalLM) -> None:
    model.double()


@unusual("on the meta device")
def meta_parameters(model: Qwen3ForCausalLM) -> None:
    model.to("meta")


@unusual("not contiguous")
def transposed_weight(model: Qwen3ForCausalLM) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t().contiguous().t()


@unusual("no plain parameter")
def tensor_subclass(model: Qwen3ForCausalLM) -> None:
    class Fancy(torch.Tensor):
        """Stands for quantised and distributed tensors."""

    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(weight.data.as_subclass(Fancy))


@unusual("quantised")
def quantised_flag(model: Qwen3ForCausalLM) -> None:
    model.is_quantized = True


@unusual("adapters loaded")
def loaded_adapters(model: Qwen3ForCausalLM) -> None:
    vars(model)["_hf_peft_config_loaded"] = True


@unusual("train mode with active dropout")
def active_dropout(model: Qwen3ForCausalLM) -> None:
    model.config.attention_dropout = 0.1
    model.train()


@unusual("rope_type='dynamic'")
def dynamic_rope(model: Qwen3ForCausalLM) -> None:
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@unusual("sliding_attention")
def sliding_window(model: Qwen3ForCausalLM) -> None:
    model.config.layer_types = ["full_attention", "sliding_attention"]


@unusual("1 layers, its config says 2")
def removed_layer(model: Qwen3ForCausalLM) -> None:
    del model.model.layers[1]


@unusual("vocabulary is .210, 64., its config says 199")
def resized_behind_the_configs_back(model: Qwen3ForCausalLM) -> None:
    model.resize_token_embeddings(210)
    model.config.vocab_size = 199


def changes() -> Iterator[Any]:  # Any: pytest's parameter sets
    """All changes above."""
    return (each for each in list(globals().values()) if type(each) is type(pytest.param()))


@pytest.mark.parametrize(("change", "reason"), list(changes()))
def test_unusual_module_is_refused_with_the_reason(
    change: Callable[[Qwen3ForCausalLM], object], reason: str
) -> None:
    model = random_model()
    change(model)

    with pytest.raises(UnsupportedOption, match=reason):
        Adoption(model)


@pytest.mark.parametrize(("change", "reason"), list(changes()))
def test_a_watched_module_that_becomes_unusual_is_noticed_and_forgiven_when_it_is_new(
    change: Callable[[Qwen3ForCausalLM], object], reason: str
) -> None:
    model = random_model()
    eligibility = Eligibility(model)
    first, again = eligibility.reason(), eligibility.reason()

    change(model)

    assert (first, again) == (None, None)
    assert re.search(reason, str(eligibility.reason()))
    assert Eligibility(random_model()).reason() is None


def test_an_edit_inside_the_config_is_noticed() -> None:
    model = random_model()
    eligibility = Eligibility(model)
    assert eligibility.reason() is None

    model.config.layer_types[1] = "sliding_attention"

    assert "sliding_attention" in str(eligibility.reason())


def test_watching_a_module_does_not_keep_it_alive() -> None:
    model = random_model()
    eligibility = Eligibility(model)
    eligibility.reason()
    alive = weakref.ref(model)

    del model
    gc.collect()

    assert alive() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_model().model,
        lambda: nn.Linear(2, 2),
        lambda: LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64)),
        lambda: overriding_class()(Qwen3Config(hidden_size=32, num_hidden_layers=1, vocab_size=64)),
    ],
    ids=["base model", "linear", "llama", "overridden forward"],
)
def test_what_is_no_qwen3_for_causal_lm_is_refused(make: Callable[[], nn.Module]) -> None:
    assert "no Qwen3ForCausalLM" in str(ineligible_reason(make()))


def test_module_that_becomes_unusual_is_refused_at_the_next_look() -> None:
    model = random_model()
    adoption = Adoption(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj = LoraLinear(attention.q_proj)

    with pytest.raises(UnsupportedOption, match="q_proj"):
        adoption.refresh()


def test_dropout_that_becomes_active_is_refused_until_it_is_off_again() -> None:
    model = random_model(attention_dropout=0.1)
    adoption = Adoption(model)
    model.train()

    with pytest.raises(UnsupportedOption, match="dropout"):
        adoption.refresh()

    model.eval()
    assert adoption.refresh() is False


def overriding_class() -> type[Qwen3ForCausalLM]:
    """A subclass that computes something else."""

    class Other(Qwen3ForCausalLM):
        """With a forward of its own."""

        def forward(self, *_: Any, **__: Any) -> None:  # Any: whatever it is called with
            """Not what we compute."""

    return Other


def assert_is_made_of(whole: Tensor, parts: list[Tensor]) -> None:
    """``whole`` is ``parts`` below each other, in the same memory."""
    offset = whole.data_ptr()
    for part in parts:
        assert part.data_ptr() == offset
        offset += part.nbytes
    assert torch.equal(whole, torch.cat([part.data for part in parts]))
    assert offset == whole.data_ptr() + whole.nbytes


def pointers_of(model: nn.Module) -> list[int]:
    """Where the parameters are."""
    return [each.data_ptr() for each in model.parameters()]


def storage_nbytes(model: nn.Module) -> int:
    """Bytes of all storages that parameters live in, each counted once."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in model.parameters()
    }
    return sum(each.nbytes() for each in storages.values())


def attributes_of(model: nn.Module) -> list[dict[str, object]]:
    """The attributes of all modules, as far as they compare."""
    return [
        {name: value for name, value in each.__dict__.items() if not name.startswith("_")}
        for each in model.modules()
    ]


def test_inputs_that_require_gradients_leave_a_model_eligible() -> None:
    model = random_model()
    model.enable_input_require_grads()  # gradient checkpointing calls it too

    assert ineligible_reason(model) is None
