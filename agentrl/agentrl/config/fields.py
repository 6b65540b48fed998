"""The base of every table of settings, and the types that their fields share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agentrl.config.secrets import check_variable

Variable = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(check_variable)
]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
HttpUrl = Annotated[str, Field(pattern=r"^https?://\S+$")]


class Table(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)
