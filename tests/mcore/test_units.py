"""Parts of `mcore/` that need torch but no training run."""

from __future__ import annotations

import argparse
import pickle
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_d3.corpus import open_domain
from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.mcore import collective, cpu
from megatron_d3.mcore.args import RunArgs, add_d3_arguments, read_run_args
from megatron_d3.mcore.dry_run import preview
from megatron_d3.mcore.position_ring import PositionRing
from megatron_d3.mcore.probe_labels import token_places
from megatron_d3.mcore.tally import DomainTally
from megatron_d3.plan.batch_schedule import BatchSchedule
from tests.corpus_helpers import documents, write_corpus

pytestmark = pytest.mark.mcore


def test_the_flags_are_frozen() -> None:
    parser = add_d3_arguments(argparse.ArgumentParser(add_help=False))
    flags = {option for action in parser._actions for option in action.option_strings}
    assert flags == {"--d3-config", "--d3-set", "--d3-plan-dir", "--d3-resume", "--d3-plugin",
                     "--d3-dry-run"}


def read(**changes: object) -> RunArgs:
    """Read arguments as Megatron leaves them, but for `changes`."""
    known = defaultdict(lambda: None, {
        "save": "new", "load": "old", "finetune": False, "d3_plan_dir": None, "d3_set": (),
        "d3_plugin": (), "train_samples": 9, "global_batch_size": 4, "num_workers": 0,
        "micro_batch_size": 2, "data_parallel_size": 1, "eval_iters": 1,
        "eval_global_batch_size": 4, "iterations_to_skip": ()} | changes)

    class Arguments(argparse.Namespace):
        def __getattr__(self, name: str) -> object:
            return known[name]

    return read_run_args(Arguments(), BatchSchedule.constant(4))


def test_the_plan_beside_the_loaded_checkpoint_is_another_runs_business_when_finetuning() -> None:
    assert read().load_plan_dir == Path("old/d3")
    assert read(load="./new").load_plan_dir is None
    assert read(d3_plan_dir=Path("p")).load_plan_dir is None
    assert read(finetune=True).load_plan_dir is None


def test_a_run_without_a_length_is_refused() -> None:
    assert read().total_samples == 8
    assert read(train_samples=None, train_iters=3).total_samples == 12
    with pytest.raises(ConfigError, match="give --train-samples or --train-iters"):
        read(train_samples=None)
    with pytest.raises(ConfigError, match=r"--train-samples: got 3, expected .* batch of 4"):
        read(train_samples=3)


def test_a_dry_run_of_a_plan_that_ends_before_its_first_step(tmp_path: Path) -> None:
    class Ended:
        def init(self) -> None:
            return None

        def decide(self, state: None) -> None:
            return None

    with pytest.raises(ConfigError, match="d3.mix.max_epochs: .* no step would be trained"):
        preview(None, [], None, Ended())  # type: ignore[arg-type]


class TestRing:
    def test_positions_are_read_back_until_they_are_overwritten(self) -> None:
        ring = PositionRing(start=100, capacity=4)
        ring.append(100, np.array([0, 1, 2], np.int16), np.array([7, 8, 9]))
        assert [ring.read(p) for p in (100, 101, 102)] == [(0, 7), (1, 8), (2, 9)]
        ring.append(103, np.array([3, 4], np.int16), np.array([10, 11]))
        assert [ring.read(p) for p in (101, 104)] == [(1, 8), (4, 11)]
        with pytest.raises(PlanError, match="position 100 was read, decided are 101-104"):
            ring.read(100)

    def test_an_undecided_position_is_refused(self) -> None:
        ring = PositionRing(start=0, capacity=4)
        with pytest.raises(PlanError, match="position 0 was read, decided are 0--1"):
            ring.read(0)
        ring.append(0, np.zeros(2, np.int16), np.zeros(2, np.int64))
        with pytest.raises(PlanError, match="position 2 was read, decided are 0-1"):
            ring.read(2)
        with pytest.raises(PlanError, match="position 4 was read"):
            ring.read(4)

    def test_a_gap_or_an_overflow_is_refused(self) -> None:
        ring = PositionRing(start=0, capacity=4)
        with pytest.raises(PlanError, match="expected to follow 0"):
            ring.append(1, np.zeros(1, np.int16), np.zeros(1, np.int64))
        with pytest.raises(PlanError, match="fit into 4"):
            ring.append(0, np.zeros(5, np.int16), np.zeros(5, np.int64))

    def test_another_process_sees_what_is_appended_later(self) -> None:
        ring = PositionRing(start=0, capacity=8)
        context = torch.multiprocessing.get_context("spawn")
        asked, answered = context.SimpleQueue(), context.SimpleQueue()
        worker = context.Process(target=_read_when_asked, args=(ring, asked, answered))
        worker.start()
        ring.append(0, np.array([5], np.int16), np.array([123456789012]))
        asked.put(0)
        assert answered.get() == (5, 123456789012)
        worker.join()


def _read_when_asked(ring: PositionRing, asked: object, answered: object) -> None:
    answered.put(ring.read(asked.get()))  # type: ignore[attr-defined]


class TestTally:
    def test_sums_and_counts_by_domain(self) -> None:
        tally = DomainTally(3)
        tally.start_step(num_microbatches=2)
        losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        tally.add(losses, mask, torch.tensor([[2, 10], [0, 11]]), is_training=True)
        tally.add(losses, mask, torch.tensor([[2, 12], [2, 13]]), is_training=True)
        assert tally.training.tolist() == [[7.0, 2.0], [0.0, 0.0], [9.0, 4.0]]
        assert tally.position_sum.item() == 46
        assert tally.evaluation.sum() == 0

    def test_a_rerun_of_the_step_counts_once(self) -> None:
        tally = DomainTally(1)
        tally.start_step(num_microbatches=1)
        for _ in range(2):
            tally.add(torch.ones(1, 4), torch.ones(1, 4), torch.tensor([[0, 3]]), is_training=True)
        assert tally.training.tolist() == [[4.0, 4.0]]
        assert tally.position_sum.item() == 3

    def test_a_bad_loss_stays_in_its_domain(self) -> None:
        tally = DomainTally(2)
        tally.start_step(num_microbatches=1)
        losses = torch.tensor([[float("nan"), 1.0], [2.0, 2.0]])
        tally.add(losses, torch.ones(2, 2), torch.tensor([[0, 0], [1, 1]]), is_training=True)
        assert tally.training[0, 0].isnan()
        assert tally.training[1].tolist() == [4.0, 2.0]


class TestAgreement:
    @pytest.mark.parametrize("world_size", [1, 2, 7])
    def test_equal_values_agree(self, world_size: int) -> None:
        sums = np.sum([collective.agreement_terms(2**64 - 1)] * world_size, axis=0)
        collective.require_agreement(sums.tolist(), world_size, what="plan")

    @pytest.mark.parametrize("values", [(1, 2), (1, 0, 2), (2**63, 2**63 + 1), (0, 2**48)])
    def test_any_difference_is_seen(self, values: tuple[int, ...]) -> None:
        sums = np.sum([collective.agreement_terms(v) for v in values], axis=0)
        with pytest.raises(PlanError, match="the ranks disagree"):
            collective.require_agreement(sums.tolist(), len(values), what="plan")


def test_device_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_D3_DEVICE", "gpu")
    with pytest.raises(ConfigError, match="MEGATRON_D3_DEVICE: got 'gpu', expected cpu or cuda"):
        cpu.wanted()
    monkeypatch.setenv("MEGATRON_D3_DEVICE", "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="PyTorch finds no CUDA device here; use cpu"):
            cpu.wanted()


class TestSamples:
    """Samples against Megatron's own `GPTDataset`, element by element."""

    @pytest.mark.parametrize("pad", [-1, 7])
    @pytest.mark.parametrize("flags", [
        (False, False, False), (True, False, False), (False, True, False), (False, False, True),
        (True, True, True)])
    @pytest.mark.parametrize("has_attention_mask", [True, False])
    def test_fields_equal_megatrons(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[bool, bool, bool],
        has_attention_mask: bool, pad: int,
    ) -> None:
        monkeypatch.setenv("RANK", "0")  # or Megatron warns that it has to guess
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split
        from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

        from megatron_d3.mcore.datasets import SampleMaker, pad_id

        eod, seq_length = 99, 16
        prefix = write_corpus(tmp_path / "c", documents(
            seed=3, num_documents=40, max_length=20, vocab_size=99, eod=eod))
        tokenizer = NullTokenizer(100, eod_id=eod, pad_id=pad)
        reset_position_ids, reset_attention_mask, eod_mask_loss = flags
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=seq_length, tokenizer=tokenizer,
            reset_position_ids=reset_position_ids, reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss, create_attention_mask=has_attention_mask,
            path_to_cache=str(tmp_path / "cache"), blend=([str(prefix)], None), split="1")
        dataset = IndexedDataset(str(prefix))
        reference = GPTDataset(
            dataset, str(prefix), np.arange(len(dataset), dtype=np.int32), None, Split.train,
            config)
        # Its order of documents and samples is shuffled; undo that, and nothing else.
        reference.document_index = np.arange(len(dataset), dtype=np.int32)
        reference.shuffle_index = np.arange(len(reference), dtype=np.int64)
        from megatron.core.datasets import helpers
        reference.sample_index = helpers.build_sample_idx(
            dataset.sequence_lengths, reference.document_index, seq_length, 1,
            int(dataset.sequence_lengths.sum()), True, True)

        domain = open_domain("c", paths=[prefix], order="stored", seq_length=seq_length, seed=0,
                             valid_fraction=0)
        maker = SampleMaker(
            eod=eod, pad=pad_id(tokenizer, is_ambiguous_allowed=False),
            reset_position_ids=reset_position_ids, reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss, create_attention_mask=has_attention_mask)
        assert domain.info.num_samples == len(reference) > 15
        for sample in range(len(reference)):
            ours, theirs = maker.fields(domain.train_tokens(sample)), reference[sample]
            assert ours.keys() == theirs.keys()
            for field, value in theirs.items():
                assert ours[field].dtype == value.dtype
                assert torch.equal(ours[field], value), (sample, field)

    def test_held_out_samples_take_turns_and_start_again(self, tmp_path: Path) -> None:
        from megatron_d3.mcore.datasets import take_turns

        assert take_turns([1, 3, 0, 2], 8).tolist() == [
            [0, 0], [1, 0], [3, 0], [1, 1], [3, 1], [1, 2], [0, 0], [1, 0]]
        assert take_turns([1, 3], 4).tolist() == [[0, 0], [1, 0], [1, 1], [1, 2]]
        assert take_turns([5, 5], 3).tolist() == [[0, 0], [1, 0], [0, 1]]

    def test_a_planned_dataset_survives_pickling(self, tmp_path: Path) -> None:
        from megatron_d3.mcore.datasets import PlannedDataset, SampleMaker

        prefix = write_corpus(tmp_path / "c", documents(seed=1, vocab_size=50))
        domain = open_domain("c", paths=[prefix], seq_length=8, seed=0, valid_fraction=0)
        maker = SampleMaker(eod=0, pad=-1, reset_position_ids=False, reset_attention_mask=False,
                            eod_mask_loss=False, create_attention_mask=False)
        ring = PositionRing(start=0, capacity=2)
        ring.append(0, np.zeros(1, np.int16), np.array([3]))
        dataset = PlannedDataset(ring, [domain], maker, total_samples=1)
        loader = torch.utils.data.DataLoader(
            dataset, num_workers=1, multiprocessing_context="spawn")
        (batch,) = list(loader)
        assert torch.equal(batch["tokens"][0], dataset[0]["tokens"])
        assert batch["origin"].tolist() == [[0, 0]]
        assert pickle.dumps(domain)


@pytest.mark.filterwarnings("ignore")  # of what Megatron misses, when it is imported
class TestSettingsOfAProbe:
    def settings(self, **changes: object) -> object:
        from megatron_d3.mcore.window_setup import probe_settings

        known = {
            "seq_length": 8, "micro_batch_size": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0,
            "num_experts": 8, "moe_router_load_balancing_type": "aux_loss",
            "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
            "tensor_model_parallel_size": 1, "context_parallel_size": 1} | changes
        return probe_settings(argparse.Namespace(**known), 50)

    @pytest.mark.parametrize(("tensor", "expert", "expert_tensor"), [
        (1, 1, 1), (2, 1, 2), (1, 4, 1), (2, 2, 2), (2, 2, 1), (2, 4, 1), (1, 2, 2)])
    def test_experts_over_whole_groups_are_probed(self, tensor: int, expert: int, expert_tensor: int) -> None:
        assert self.settings(
            tensor_model_parallel_size=tensor, expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor).has_dropout  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("changes", "message"), [
        ({"tensor_model_parallel_size": 2}, "expert-tensor-parallel-size 1: .* is 2 and experts"),
        ({"expert_model_parallel_size": 2, "context_parallel_size": 2}, "use one of them"),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 4},
         "parallel-size 2 times .* multiple of --tensor-model-parallel-size 4"),
    ])
    def test_other_layouts_of_experts_are_refused(self, changes: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.settings(**changes)
        self.settings(**changes, num_experts=None)

    @pytest.mark.parametrize(("attribute", "value", "flag"), [
        ("fp8", "hybrid", "--fp8-format"), ("fp4", "e2m1", "--fp4-format"), ("fp16", True, "--fp16"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
        ("use_megatron_fsdp", True, "--use-megatron-fsdp"),
        ("use_torch_fsdp2", True, "--use-torch-fsdp2"),
        ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm"),
        ("delay_wgrad_compute", True, "--delay-wgrad-compute"),
        ("defer_embedding_wgrad_compute", True, "--defer-embedding-wgrad-compute"),
        ("moe_input_jitter_eps", 0.01, "--moe-input-jitter-eps"),
        ("moe_router_force_load_balancing", True, "--moe-router-force-load-balancing"),
        ("moe_router_force_biased", 0.1, "--moe-router-force-biased"),
        ("moe_router_load_balancing_type", "sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
    ])
    def test_what_makes_measurements_wrong_is_refused(
        self, attribute: str, value: object, flag: str
    ) -> None:
        with pytest.raises(ConfigError, match=rf"^{flag}: not possible with d3.order: \w"):
            self.settings(**{attribute: value})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_context_parallel_rank_knows_which_tokens_it_holds(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn labels depend on a token's place in the sequence; Megatron deals the sequence out."""
    for rank in range(size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
        batch = get_batch_on_this_cp_rank(
            {"tokens": torch.arange(16)[None], "cu_seqlens": None}, is_hybrid_cp=False,
            cp_group=object(), use_per_sequence_balancing=True)
        assert token_places(16 // size, rank, size).tolist() == batch["tokens"][0].tolist()
