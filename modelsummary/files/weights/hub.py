"""Read the configuration and the headers of weights of a repository on the Hugging Face Hub, without the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelsummary.errors import InputError, ModelFileError, in_short
from modelsummary.extras import needs
from modelsummary.files.budget import Budget
from modelsummary.files.file_errors import reading
from modelsummary.files.weights.safetensors import statistics_of_parts, tensors_of_header
from modelsummary.files.weights.stored import StoredTensor, WeightStatistics

__all__ = ["configuration_file", "load_repository", "repository_of"]

_SCHEME = "hf"
_UNREACHABLE = "it is not in the cache, and the Hugging Face Hub cannot be reached; connect, or pass a local file"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def repository_of(name: str) -> str | None:
    """Return the repository ``org/name`` that ``hf:org/name`` names; None for any other name.

    >>> repository_of("hf:Qwen/Qwen3-0.6B"), repository_of("hf:config.json"), repository_of("hf:folder/config.json")
    ('Qwen/Qwen3-0.6B', None, None)
    """
    scheme, _, repository = name.partition(":")
    is_named = scheme == _SCHEME and _NAME.fullmatch(repository) and not repository.lower().endswith(".json")
    return repository if is_named else None


def configuration_file(repository: str) -> Path:
    """Return the path of ``config.json`` of a repository in the cache of huggingface_hub, which downloads it if needed.

    Raises:
        InputError: the repository cannot be read.
        MissingExtraError: huggingface_hub is not installed.
    """
    with _reading(repository):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repository, "config.json"))


def load_repository(repository: str) -> WeightStatistics:
    """Return the statistics of the tensors in the safetensors files of a repository, from their headers.

    Raises:
        InputError: the repository cannot be read, or has no safetensors files.
        ModelFileError: the headers contradict themselves or the index.
        MissingExtraError: huggingface_hub is not installed.
    """
    with _reading(repository):
        from huggingface_hub import get_safetensors_metadata

        metadata = get_safetensors_metadata(repository)
    files = metadata.files_metadata
    budget = Budget.of_size(100 * sum(len(file.tensors) for file in files.values()))

    def part(name: str) -> dict[str, StoredTensor]:
        if name not in files:
            raise ModelFileError(f"the index names the file {name[:80]!r}, which the repository lacks")
        return tensors_of_header(
            {
                fqn: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
                for fqn, tensor in files[name].tensors.items()
            }
        )

    path = _path(repository)
    with reading(path):
        index = {"metadata": metadata.metadata, "weight_map": metadata.weight_map}
        return statistics_of_parts(index, part, path, budget)


def _path(repository: str) -> Path:
    return Path(f"{_SCHEME}:{repository}")


@contextmanager
def _reading(repository: str) -> Iterator[None]:
    """Run the body, which reads from the Hub; raise errors that say in one line what went wrong there."""
    with needs("huggingface_hub", "hub"):
        import huggingface_hub.errors as hub
    with reading(_path(repository)):
        try:
            yield
        except hub.GatedRepoError:
            raise InputError("it is gated; ask for access on its page, then log in with 'hf auth login'") from None
        except hub.RepositoryNotFoundError:
            raise InputError(
                "the Hugging Face Hub shows no such repository; check the name, or log in with 'hf auth login' if it "
                "is private"
            ) from None
        except hub.NotASafetensorsRepoError:
            raise InputError("it has no weights in safetensors, whose headers are read; pass a local file") from None
        except hub.SafetensorsParsingError as error:
            raise ModelFileError(in_short(error)) from None
        except hub.EntryNotFoundError as error:
            if isinstance(error, hub.LocalEntryNotFoundError):
                raise InputError(_UNREACHABLE) from None
            raise InputError("it has no config.json; expected the repository of a transformers model") from None
        except Exception as error:  # errors of the network have the classes of the client that huggingface_hub uses
            raise InputError(f"{_UNREACHABLE}: {in_short(error)}") from error
