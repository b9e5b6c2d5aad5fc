"""``pb_utils.ModelConfig``: what ``auto_complete_config`` may say of a model, and the look-ups in a configuration."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]


class ModelConfig:
    """A configuration that a model completes.

    Args:
        model_config: JSON.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: Json = json.loads(model_config)

    def as_dict(self) -> Json:
        """The configuration."""
        return self._model_config

    @property
    def _name(self) -> str:
        return self._model_config.get("name", "")

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets the largest batch.

        Raises:
            ValueError: the file asks for a larger one.
        """
        given = self._model_config.get("max_batch_size", 0)
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Asks for the dynamic batcher, unless the file asks for it already.

        Raises:
            ValueError: the file asks for another scheduler.
        """
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Json) -> None:
        """Sets ``{"decoupled": bool}``.

        Raises:
            ValueError: another key, or the file says the opposite.
        """
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in auto-complete-config function for model '{self._name}' "
                    "contains property other than 'decoupled'."
                )
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        given = self._model_config.get("model_transaction_policy", {}).get("decoupled")
        if given is not None and given != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{given}'."
            )
        self._model_config["model_transaction_policy"] = {"decoupled": wanted}

    def add_input(self, input: Json) -> None:
        """Declares an input: name, data_type, dims and maybe optional.

        Raises:
            ValueError: a property is missing, unknown or contradicts the file.
        """
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Json) -> None:
        """Declares an output: name, data_type, dims.

        Raises:
            ValueError: a property is missing, unknown or contradicts the file.
        """
        self._add("output", output, ("name", "data_type", "dims"))

    def _add(self, kind: str, tensor: Json, allowed: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        name = tensor["name"]
        for required in ("data_type", "dims"):
            if required not in tensor:
                raise ValueError(f"{kind} '{name}' {where} is missing '{required}' property.")
        if any(key not in allowed for key in tensor):
            listed = ", ".join(f"'{key}'" for key in allowed[:-1])
            raise ValueError(f"{kind} '{name}' {where} contains property other than {listed} and '{allowed[-1]}'.")
        tensors: list[Json] = self._model_config.setdefault(kind, [])
        for given in tensors:
            if given["name"] == name:
                self._match(kind, given, tensor)
                given.update(tensor)
                return
        tensors.append(dict(tensor))

    def _match(self, kind: str, given: Json, tensor: Json) -> None:
        """Refuses what the file says otherwise."""
        name = tensor["name"]
        given_type = given.get("data_type", "TYPE_INVALID")
        if given_type not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {given_type} for {kind} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        if given.get("dims") and list(given["dims"]) != list(tensor["dims"]):
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects dims {tensor['dims']} but the model "
                f"configuration specifies dims {given['dims']}"
            )
        # What the file leaves out reads as false: only a declared true can contradict.
        if given.get("optional") and tensor.get("optional") is False:
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects optional {tensor['optional']} but the "
                f"model configuration specifies optional {given['optional']}"
            )


def get_input_config_by_name(model_config: Json, name: str) -> Json | None:
    """The properties of an input; None without it."""
    return next((one for one in model_config.get("input", ()) if one["name"] == name), None)


def get_output_config_by_name(model_config: Json, name: str) -> Json | None:
    """The properties of an output; None without it."""
    return next((one for one in model_config.get("output", ()) if one["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Json) -> bool:
    """Whether a request may have no answer or many."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
