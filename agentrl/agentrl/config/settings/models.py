"""The base model, the adapters of it, and the models of other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.config.field_types import (
    AdapterName,
    Count,
    HttpUrl,
    Names,
    Positive,
    Table,
    Variable,
    Whole,
    from_json,
    names_as_table,
)
from agentrl.config.secrets import check_params, check_url


class ModelSettings(Table):
    """The base model and its adapter."""

    name: Annotated[str, Field(min_length=1)] = "agentrl-tiny"
    """Base model: agentrl-tiny or smollm2-135m (built in), a folder, or a Hugging Face name."""
    device: str = "auto"
    """Torch device of sampler and trainer: auto, cpu, cuda, cuda:1, mps, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the base model; the adapter trains in float32."""
    cores: Count | None = None
    """CPU cores for sampler and trainer; by default all that this process may use. A run that is
    resumed keeps its number, because the last bits of its figures depend on it."""
    load_in_4bit: bool = False
    """Load the base model's linear layers in 4 bits (NF4, as in QLoRA)."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. It could do anything."""
    chat_template: Literal["role_colon"] | None = None
    """Chat template of a base model, which has none: role_colon writes `User: ...` and `Assistant:
    ...`, and knows no tools. By default the model's own."""
    adapter: AdapterName = "policy"
    """Name of the adapter: the model name that the agent requests."""

    @property
    def of_tokenizer(self) -> dict[str, Any]:
        """What ``load_facts`` takes beside a name."""
        return self.model_dump(include={"trust_remote_code", "chat_template"})


class ServeModelSettings(ModelSettings):
    adapter_path: Path | None = None
    """A run folder, RUN@STEP, RUN@best, or a PEFT folder; by default the base model."""


BASE = "base"


class EvalModelSettings(ModelSettings):
    adapter_path: Names = Field(default_factory=list[str])
    """A run folder, RUN@STEP, RUN@best, a PEFT folder, or base: the base model, which is the
    default. Give several to compare them on the same tasks and seeds."""
    answered_by: str | None = None
    """Evaluate this model of the [models] table, beside adapter_path or instead of the base."""

    def evaluated(self) -> list[tuple[str, str | None, str | None]]:
        """Return, of each model that is evaluated, its name, its adapter and who answers for it."""
        found: list[tuple[str, str | None, str | None]] = [
            (path, None if path == BASE else path, None) for path in self.adapter_path
        ]
        if (other := self.answered_by) is not None:
            found.append((other, None, other))
        return found or [(BASE, None, None)]


class RunModelSettings(ServeModelSettings):
    base_url: HttpUrl | None = None
    """Call the model at this OpenAI base URL (`agentrl serve` too), instead of loading it here."""
    api_key_env: Variable | None = None
    """NAME of the environment variable that holds that server's key."""


class AdapterSettings(Table):
    """One of several adapters that train together."""

    agents: Annotated[Names, Field(min_length=1)] | None = None
    """Agents (roles) that train it. It answers their calls that name no other adapter, and only
    theirs train it. By default every call that it answers."""
    rewards: Annotated[Names, Field(min_length=1)] | None = None
    """Names of the rewards that count for it, summed; by default all of them."""


Adapters = Annotated[dict[str, AdapterSettings], BeforeValidator(names_as_table)]


class OtherModelSettings(Table):
    """A model that another server answers: an answerer, a judge, a search model."""

    model: Annotated[str, Field(min_length=1)]
    """LiteLLM's name of the model, for instance openai/gpt-4o-mini."""
    api_base: Annotated[str, AfterValidator(check_url)] | None = None
    """URL of the provider; by default LiteLLM's for it."""
    api_key_env: Variable | None = None
    """NAME of the environment variable that holds the key; never the key itself."""
    timeout: Positive = 120
    """Seconds after which one try is canceled."""
    num_retries: Whole = 2
    """Further tries after a failure."""
    fallbacks: Names = Field(default_factory=list[str])
    """Other models of this table to call when it fails."""
    params: Annotated[dict[str, Any], BeforeValidator(from_json), AfterValidator(check_params)] = (
        Field(default_factory=dict[str, Any])
    )
    """More of LiteLLM's parameters; no keys: os.environ/NAME stands for one in the environment, as
    in extra_headers = {authorization = "Bearer os.environ/NAME"}."""


OtherModels = Annotated[dict[str, OtherModelSettings], BeforeValidator(from_json)]
