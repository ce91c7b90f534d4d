"""The situations that the engine must get right, by id, and the tests that prove each: none may lose its test unnoticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = """
B01 B03 B04 B06 B07 B08 B09 B12 B15 B18 B20 B21 B23 B25 B26 B27 B28 B29 B32 B33 B34 B35 B38 B39 B40 B41 B42 B43 B45 B47 B48 B49
B51 B52 B54 B55 B56 H1 H2 H4 H5 P1 P2 P3 P4 P5 P6
"""
IDS = WORDS.split()
CASES: dict[str, str] = {  # id -> file::test, without the folder and the ending
    "B01": "test_allocators::test_hits_leave_one_token_to_compute core/testing/allocator::test_hits_at_block_edges",
    "B03": "test_step::test_refused_requests_hold_nothing test_step::test_reserve_is_all_or_nothing",
    "B04": "test_allocators::test_hit_over_reused_room_is_a_miss",
    "B06": "test_step::test_a_prefix_published_by_another_meanwhile test_engine::test_workloads_with_aborts_leave_nothing",
    "B07": "test_engine::test_a_pool_too_small_for_the_wish",
    "B08": "test_engine::test_a_prompt_larger_than_the_pool_is_refused",
    "B09": "test_engine::test_preemption_changes_no_token",
    "B12": "test_golden::test_chunks_are_contiguous test_llm::test_chunked_and_cached_logits",
    "B15": "test_engine::test_mixed_serves_every_running_request test_engine::test_fcfs_starves_unless_bounded",
    "B18": "test_allocators::test_a_hash_without_the_parent_shares_nothing_wrong",
    "B20": "test_engine::test_workloads_with_aborts_leave_nothing",
    "B21": "test_engine::test_abort",
    "B23": "test_engine::test_bad_prompts_leave_the_queue_alone test_llm::test_a_bad_prompt_is_named_and_nothing_is_queued",
    "B25": "test_engine::test_length_limit",
    "B26": "test_checkpoint::test_stop_tokens test_engine::test_stop_tokens",
    "B27": "test_stop_strings::test_any_pieces test_stop_strings::test_a_request_ends",
    "B28": "test_samplers::test_temperature_zero_is_argmax_and_leaves_others_alone",
    "B29": "test_samplers::test_top_p_keeps_the_token_that_crosses",
    "B32": "test_samplers::test_a_row_is_the_same_alone_and_in_any_batch test_engine::test_seeds test_matrix::test_pairwise",
    "B33": "test_llm::test_chunked_and_cached_logits test_matrix::test_pairwise",
    "B34": "test_samplers::test_rows_without_a_finite_logit_are_refused test_engine::test_nan_rows_end_alone",
    "B35": "test_weights::test_all_problems_at_once test_checkpoint::test_no_weights",
    "B38": "test_prologue::test_rope_settings_of_every_age test_prologue::test_rope_tables_equal_transformers",
    "B39": "test_models::test_head_size_apart_from_hidden_size test_models::test_head_size_defaults",
    "B40": "test_models::test_head_size_apart_from_hidden_size test_parallel_layers::test_ranks_agree_with_one",
    "B41": "test_parallel_layers::test_ranks_agree_with_one test_parallel_layers::test_uneven_groups_are_refused",
    "B42": "test_checkpoint::test_dtype test_resolve::test_flash_on_a_cpu_says_all_that_is_missing",
    "B43": "test_models::test_rms_norm_and_residual",
    "B45": "test_text::test_stream_of_text test_text::test_stream_of_garbage test_text::test_stream_of_the_default_model",
    "B47": "test_attention::test_padded_rows_write_the_scratch_block_only",
    "B48": "test_attention::test_random_steps_equal_the_dense_definition",
    "B49": "test_triton_attention::test_offsets_beyond_31_bits",
    "B51": "test_attention::test_rows_without_tokens_are_refused",
    "B52": "test_workers::test_the_smallest_pool_counts",
    "B54": "test_workers::test_a_taken_port_is_in_nobodys_way test_llm::test_two_engines_at_once",
    "B55": "test_workers::test_a_plan_of_four_megabytes test_workers::test_ctrl_c_and_a_killed_parent_leave_nothing",
    "B56": "test_workers::test_a_rank_killed_in_a_step_is_named test_workers::test_a_rank_killed_while_loading",
    "H1": "test_llm::test_engine_after_engine_releases_everything test_sweep::test_twelve_cells_of_which_four_do_not_work",
    "H2": "test_sweep::test_twelve_cells_of_which_four_do_not_work test_sweep::test_further_endings",
    "H4": "test_sweep::test_further_endings test_sweep::test_a_new_version_of_one_plugin_runs_its_cells_again",
    "H5": "test_config::test_what_hydra_lets_pass test_config::test_unknown_names test_config::test_wrong_values",
    "P1": "test_plugins::test_a_broken_plugin_is_one_line test_examples::test_the_others_go_on",
    "P2": "test_resolve::test_auto_skips_what_cannot_run_here_but_a_name_does_not",
    "P3": "test_plugins::test_two_distributions_offer_one_option test_plugins::test_two_distributions_with_one_plugin_name",
    "P4": "test_plugins::test_a_misspelt_hook test_plugins::test_a_forgotten_decorator test_plugins::test_a_wrong_target",
    "P5": "test_resolve::test_workers_use_what_the_parent_resolved test_examples::test_workers_use_what_the_parent_resolved",
    "P6": "test_plugins::test_another_version_of_the_interface test_api::test_the_version_is_said_where_the_import_fails",
}
OPEN: dict[str, str] = {}  # what no test proves yet, and why


def names_in(path: Path) -> set[str]:
    """Names of all test functions of a file, those of classes too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize(
    "case", [pytest.param(i, marks=pytest.mark.xfail(reason=OPEN[i], strict=True) if i in OPEN else ()) for i in IDS]
)
def test_a_case_has_tests(case: str) -> None:
    """Each that the map names exists. A case that gets its first test fails here until it leaves OPEN."""
    assert case in CASES, f"no test proves {case}"
    for entry in CASES[case].split():
        name, _, test = entry.partition("::")
        path = ROOT / f"{name}.py" if "/" in name else ROOT / f"tests/{name}.py"
        assert path.is_file() and test in names_in(path), f"{case}: there is no {entry}"


def test_the_map_is_whole() -> None:
    """No id twice, none that is not known, none both open and proven."""
    assert len(set(IDS)) == len(IDS) == len(CASES) + len(OPEN)
    assert CASES.keys() | OPEN.keys() == set(IDS)
