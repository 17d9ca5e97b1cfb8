"""``siirl-dask migrate`` reads a script as bash does, and lists what bash alone would know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.commands.migrate import migrate
from siirl_dask.commands.migrate.shell import read_script
from siirl_dask.config.file import load_config_file
from siirl_dask.errors import ConfigError
from tests.commands.shell_oracle import compare, words_of_bash, words_read

FILES = Path(__file__).parent / "migrate_files"
CALL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
OPTION = "data.train_batch_size"
SCRIPTS = {
    "branches on a variable with a default": """
        MODE=${MODE:-fast}
        if [ "$MODE" = slow ]; then N=1; elif [[ $MODE == f* && -n $MODE ]]; then N=2; else N=3; fi
        python3 -m verl.trainer.main_ppo data.train_batch_size=$N
    """,
    "case with several patterns and a default": """
        K=b; case "$K" in a) N=1;; b|c) N=2;; *) N=3;; esac
        case x.yaml in *.json) M=1;; *.y?ml) M=2;; esac
        python3 -m verl.trainer.main_ppo data.train_batch_size=$N trainer.nnodes=$M
    """,
    "strings that hold several options are split": """
        CONFIG="data.train_batch_size=4   trainer.nnodes=2
          trainer.project_name=x"
        python3 -m verl.trainer.main_ppo $CONFIG "trainer.experiment_name=a b" trainer.logger='["console"]'
    """,
    "arrays": """
        A=(data.train_batch_size=4 "trainer.project_name=a b") # comment
        A+=(trainer.nnodes=${#A[@]})
        EMPTY=()
        python3 -m verl.trainer.main_ppo "${A[@]}" "${EMPTY[@]}" ${EMPTY[@]+"${EMPTY[@]}"} "$@" $EXTRA_UNSET_IS_ASKED
    """.replace(" $EXTRA_UNSET_IS_ASKED", ""),
    "defaults, alternatives and cuts": """
        P=/data/model.tar.gz; S=${P##*/}; B=${S%%.*}; E=${P%.*}; L=${B^^}; R=${P//\\//_}
        : ${Q:=7}
        unset P; T=${P:-none}; U=${P:+set}; V=${B:+set}; W=${B:1:3}
        python3 -m verl.trainer.main_ppo trainer.a=$S trainer.b=$B trainer.c=$E trainer.d=$L trainer.e=$R \\
            trainer.f=$Q trainer.g=$T trainer.h="$U" trainer.i=$V trainer.j=$W trainer.k=${#B}
    """,
    "arithmetic": """
        A=$((1024 * 2)); ((A += 8)); B=$((A / 3 % 7 - -2)); C=$(( A > 3 && B < 4 ))
        N=0; for i in 1 2 3; do N=$((N + i)); done
        while (( N < 20 )); do N=$((N * 2)); done
        python3 -m verl.trainer.main_ppo data.a=$A data.b=$B data.c=$C data.n=$N
    """,
    "functions, locals and positional parameters": """
        B=outer
        size() { local B=$1; shift; N=$((B * $#)); if [ "$1" = 8 ]; then return; fi; N=0; }
        size 4 8 9
        launch() { python3 -m verl.trainer.main_ppo data.train_batch_size=$N trainer.project_name=$B "$@"; }
        launch trainer.nnodes=2 "trainer.experiment_name=x y"
    """,
    "quotes": """
        A='$B'; B="it's"; C=a\\ b
        python3 -m verl.trainer.main_ppo trainer.a=$A trainer.b="$B" trainer.c="$C" 'trainer.d=["x", "y"]' \\
            trainer.e="say \\"x\\"" trainer.f=$'a\\tb' trainer.g="a\\$b" +trainer.h=\\{a:1\\}
    """,
    "lists of commands, pipelines and subshells": """
        A=1; (A=2; cd /); A=$A; { B=3; } ; false || C=4; true && D=5; false && D=6
        echo x | read A
        [ "$A" = 1 ] && ! [ "$B" = 4 ] && E=6
        python3 -m verl.trainer.main_ppo trainer.a=$A trainer.b=$B trainer.c=$C trainer.d=$D trainer.e=$E 2>&1 | tee log
    """,
    "here-documents and continued lines": """
        cat > file.py <<EOF
        python3 -m verl.trainer.main_ppo data.train_batch_size=9
EOF
        python3 -u -m verl.trainer.main_ppo \\
            data.train_batch_size=8 \\
            trainer.project_name=a\\
b
    """,
    "eval expands again": """
        N=3; CMD=(python3 -m verl.trainer.main_ppo data.train_batch_size=\\$N)
        eval "${CMD[@]}" trainer.nnodes=2
    """,
    "a launcher before the module": """
        LAUNCH=(python3)
        if [ "${USE_UV:-1}" != 0 ] && { [ a = a ] || [ b = c ]; }; then LAUNCH=(uv run python3); fi
        "${LAUNCH[@]}" -m verl.trainer.main_ppo trainer.py_executable="uv ${LAUNCH[*]}"
    """,
}  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("name", [*SCRIPTS])
def test_words_are_those_that_bash_passes(name):
    result = compare(SCRIPTS[name], name, {})
    assert result is not None, "bash reached no call: the script of this test is wrong"
    assert (result.verdict, result.differences) == ("equal", [])


# each line before the call, then words of the call
LINES = [
    ('MODEL=Qwen/Qwen2.5-7B; if [[ "$MODEL" == *"Qwen"* ]]; then TP=4; else TP=1; fi', "a.b=$TP"),
    ('M=v2x; case "$M" in "v"[0-9]*) X=1 ;; *"*"*) X=2 ;; *) X=3 ;; esac', "a.b=$X"),
    ("P=a*c; if [[ abc == $P ]]; then X=1; fi; if [[ abc == \"$P\" ]]; then X=2; fi", "a.b=$X"),
    ("if [[ abc == [^b]* ]]; then X=1; else X=2; fi", "a.b=$X"),
    ("shopt -s nocasematch; if [[ ABC == a* ]]; then X=1; else X=2; fi", "a.b=$X"),
    ("set -- y", 'a.b=1 2>&1 a.c=2 "$@"'),
    ("set -- y", 'a.b=1 > log 2>&1 "$@"'),
    ("set -- --x a.b=1 a.c=2", '"${@:2}"'),
    ("set a b; set -- \"$@\" c; shift 5; shift", "a.b=$#$1"),
    ("A=(--x a.b=1 a.c=2)", '"${A[@]:1}"'),
    ("A=(1 2 3)", '"a.d=${A[*]:1:2}" a.e=${A[-1]} a.f=x${A[7]} "${A[@]/#/a.g=}"'),
    ("X=a.txt", "a.b=${X/%.txt/.bak} a.c=${X/#a/b} a.d=x${X: -9} a.e=${X/#b/c}"),
    ('X=ab*c; Y="b*"', 'a.b=${X/"$Y"/-} a.c=${X/$Y/-}'),
    ("X=0; D=1; export D=/x L=$D/log; f() { local X=1 Y=x$X; Z=$Y; }; f", "a.b=$L a.c=$Z"),
    ('V=N; export "Q=7" "W_$V=8"', "a.b=$Q a.c=${W_N-}"),
    ("X=0; ( set -- q; f() { X=1; } ); X=2 & (X=3; return 0); g() { X=4; }; g & wait", "a.b=x$X a.c=x$1"),
    ("i=1; ((++i)); ((i++)); ((i+=2))", "a.b=$i"),
    ("N=5; X=0; if [[ N -gt 2 ]]; then X=1; fi; if [[ $N+1 -eq 6 ]]; then Y=1; fi", "a.b=$X a.c=$Y"),
    ('X=0; N=5; if ((!N && 1)); then X=1; fi', "a.b=x$X"),
]  # fmt: skip
UNTOLD = [
    ("N=08", "a.b=$((10#$N + 1))"),
    ("i=1; j=$((++i)); k=$((!2 == 1))", "a.b=$j a.c=$i a.d=$k"),
    ("i=5; ((j=i++))", "a.b=$i"),
    ("", "a.b=/d/{train,test}.parquet"),
    ("", "a.b=$[3+4]"),
    ("", "a.b=$'\\x41'"),
    ("declare -i N=3+4", "a.b=$N"),
    ("A=([2]=x y); B=(1 2); B[5]=9; unset 'B[0]'", "a.b=${A[0]} a.c=${B[1]}"),
    ("X=abc", "a.b=${X^^[a]}"),
    ("if [[ ab == @(ab|cd) ]]; then X=1; else X=2; fi", "a.b=$X"),
    ("for i in 1 2; do for j in 1 2; do X=$i$j; break 2; done; done", "a.b=$X"),
    ("while read -r l; do X=$l; done < file", "a.b=x$X"),
    ("IFS=,; A=(1 2)", 'a.b="${A[*]}"'),
]  # fmt: skip


def script_of(before, words):
    return f"{before}\npython3 -m verl.trainer.main_ppo {words}\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("before", "words"), LINES)
def test_a_line_is_read_as_bash_runs_it(before, words):
    text = script_of(before, words)
    script = read_script(text, "s.sh", {})
    assert len(script.ways) == 1
    expected = words_of_bash(text)
    assert expected is not None
    assert words_read(script) == [one for one in expected if one]


@pytest.mark.parametrize(("before", "words"), UNTOLD)
def test_what_is_not_followed_is_refused_asked_or_noted_and_never_read_otherwise(before, words):
    try:
        script = read_script(script_of(before, words), "s.sh", {})
    except ConfigError:
        return
    asked = any(option.unread for way in script.ways for option in way.options)
    assert asked or len(script.ways) > 1 or any(way.notes for way in script.ways)


def test_a_local_variable_of_a_function_is_not_unset_outside_of_it():
    script = read_script(script_of("f() { local DEV; DEV=1; }; f", "a.b=$DEV"), "s.sh", {})
    assert words_read(script) == ["a.b=${oc.env:DEV}"]


def test_a_long_string_takes_no_time():
    text = "x" * 100_000
    (word,) = words_read(read_script(script_of(f'A="{text}"', "a.b=$A"), "s.sh", {}))
    assert word == f"a.b={text}"


PIECES = st.lists(
    st.sampled_from(
        ["-a", "-b c", "$A", '"$A"', "${A}", "${B:-d e}", '"${B:-d e}"', "'q r'", '"${L[@]}"', "${L[@]}", '"${L[*]}"',
         "${A% *}", "${A#* }", "$((N*2))", "\\ ", '""',
         "${E:-}", "${E}", "${L[1]}", "${#L[@]}", "-x$A", "=$A", "${A/1/z w}",
         '"${E[@]}"', '"$@"', '${E:+"no"}', '${A:+"y  n"}', "~", "$'t'"]
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@settings(max_examples=40, deadline=None)
@given(PIECES, st.booleans())
def test_any_mix_of_expansions_is_split_as_bash_splits_it(pieces, assigned):
    # a blank within an assignment makes it one for the command that follows
    word = "".join(pieces if not assigned else [one for one in pieces if one != "-b c"]) + ".e"
    start = "A='1 2'; N=4; L=(x 'y z'); E=()\nunset E B\n"
    use = f'V={word}\npython3 -m verl.trainer.main_ppo $V "$V"' if assigned else (
        f"python3 -m verl.trainer.main_ppo {word}"
    )  # fmt: skip
    expected = words_of_bash(f"{start}{use}\n")
    assert expected is not None
    found = words_read(read_script(f"{start}{use}\n", "s.sh", {}))
    assert found == [one for one in expected if one]


def questions_of(tmp_path, text, *more):
    path = tmp_path / "run.sh"
    path.write_text(text)
    done = migrate([str(path), *more], 100)
    return done, [line for line in done.report.splitlines() if line.startswith("TO DECIDE")]


def test_a_branch_that_is_not_known_leaves_both_values_and_no_default(tmp_path):
    text = f'N=8\nif [ "$USE_BIG" = 1 ]; then\n  N=64\nfi\n{CALL} {OPTION}=$N\n'
    done, questions = questions_of(tmp_path, text)
    assert (
        "batch_size: ???  # TO DECIDE: 64 (line 3: USE_BIG=1) or 8 (line 1: not USE_BIG=1)"
        in done.text
    )
    assert any("give USE_BIG=value after the file" in one for one in questions)
    assert "steps: ???" in done.text, "the steps follow from the batch"
    done, questions = questions_of(tmp_path, text, "USE_BIG=1")
    assert "batch_size: 64" in done.text
    assert not questions
    done, _ = questions_of(tmp_path, text, "USE_BIG=")
    assert "batch_size: 8" in done.text


def test_what_a_command_prints_decides_all_its_branches_together(tmp_path):
    text = (
        "DEVICE=${DEVICE:-$(probe || echo gpu)}\ncase $DEVICE in gpu|npu) ;; *) exit 1;; esac\nEXTRA=()\n"
        'case "$DEVICE" in\n gpu) N=1024;;\n npu) N=16\n EXTRA+=(actor_rollout_ref.rollout.n=4);;\nesac\n'
        'if [ "$DEVICE" = npu ]; then M=16; else M=256; fi\n'
        f"{CALL} {OPTION}=$N actor_rollout_ref.actor.ppo_mini_batch_size=$M "
        '"${EXTRA[@]}"\n'
    )
    done, questions = questions_of(tmp_path, text)
    assert "TO DECIDE: 1024 (line 5: DEVICE=gpu) or 16 (line 6: DEVICE=npu)" in done.text
    assert (
        "minibatches: ???  # TO DECIDE: 4 (line 9: DEVICE=gpu) or 1 (line 9: DEVICE=npu)"
        in done.text
    )
    assert "n: ???" in done.text
    assert "DEVICE=gpu or DEVICE=npu; give DEVICE=value" in questions[0]
    done, questions = questions_of(tmp_path, text, "DEVICE=npu")
    assert "batch_size: 16 " in done.text
    assert not questions


def test_a_condition_that_changes_no_option_is_not_asked_for(tmp_path):
    text = f"if [ -f data.parquet ]; then X=1; else python3 prepare.py; fi\n{CALL} {OPTION}=8\n"
    done, questions = questions_of(tmp_path, text)
    assert not questions
    assert "batch_size: 8" in done.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("$(nproc)", "what `$(nproc)` prints"),
        ("$BS", "$BS, which the environment has"),
        ("$((BS * 2))", "what `$((BS * 2))` prints"),
    ],
)
def test_a_number_that_is_not_known_is_never_the_default(tmp_path, value, said):
    done, _ = questions_of(tmp_path, f"{CALL} {OPTION}={value}\n")
    assert f"batch_size: ???  # TO DECIDE: {OPTION} is {said}" in done.text
    assert "minibatches: ???  # TO DECIDE: it follows from" in done.text
    settled = [line for line in done.text.splitlines() if "TO DECIDE" not in line]
    assert not any("1024" in line for line in settled)


def test_the_time_in_a_name_is_left_out_and_said(tmp_path):
    done, _ = questions_of(tmp_path, f"{CALL} {OPTION}=8 trainer.experiment_name=run_$(date +%s)\n")
    assert "name: run  #" in done.text
    assert "trainer.experiment_name: the time in $(date +%s) is left out" in done.report


def test_options_within_one_quoted_word_are_refused(tmp_path):
    text = f'A="data.train_batch_size=4 trainer.nnodes=2"\n{CALL} "$A"\n'
    with pytest.raises(ConfigError, match="one word with several options"):
        questions_of(tmp_path, text)


def test_more_ways_than_can_be_followed_ask_for_the_variables(tmp_path):
    tests = "".join(f'if [ "$V{n}" = 1 ]; then A{n}=1; fi\n' for n in range(8))
    with pytest.raises(ConfigError, match=r"in more than 64 ways: give V0=value, V1=value"):
        questions_of(tmp_path, f"{tests}{CALL} {OPTION}=8\n")


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; }\nf\n",
        "while true; do :; done\n",
        "A=x\nfor i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21; do A=$A$A; done\n",
        "A=$((1 << 62))\nfor i in $A; do for j in a b; do f; done; done\nB=${A\n",
    ],
)
def test_a_script_that_does_not_end_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        questions_of(tmp_path, text)


DECISIONS = {
    "data.url": "/rows.parquet",
    "cluster.placement": "{}",
    "rewards.function": "siirl_dask.rewards:exact_match",
    "algorithm.loss": "siirl_dask.algorithms:ppo_clip",
    "algorithm.old_logprobs": "rollout_logprobs",
    "trainer.backend": "megatron",
    "trainer.lora.targets": "[all-linear]",
}
"""Keys that the scripts below leave open, and what a person may write."""
_LOSS = {"algorithm.loss"}
OPEN_KEYS = {
    "generation/run_deepseek_llm_7b.sh": {"data.url"},
    "grpo_trainer/run_minicpm_o_2_6_fsdp.sh": {"data.url"},
    "grpo_trainer/run_mistral_nemo_12b_skyworkrm_fsdp.sh": {"rewards.function"},
    "mtp_trainer/run_mimo_7b_mtp_fully_async_megatron_multinode.sh": {"cluster.placement"} | _LOSS,
    "mtp_trainer/run_mimo_7b_mtp_megatron.sh": _LOSS,
    "mtp_trainer/run_mimo_7b_mtp_rl_vllm_sgl_megatron.sh": _LOSS,
    "on_policy_distillation_trainer/run_qwen3_0.6b_opd_veomni.sh": _LOSS,
    "on_policy_distillation_trainer/run_qwen3_5_4b_fsdp.sh": _LOSS,
    "on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh": _LOSS,
    "on_policy_distillation_trainer/run_qwen3_8b_megatron.sh": _LOSS,
    "on_policy_distillation_trainer/run_qwen3_8b_mopd_fsdp.sh": _LOSS,
    "on_policy_distillation_trainer/run_qwen3_8b_mopd_veomni.sh": _LOSS,
    "on_policy_distillation_trainer/run_qwen3_vl_8b_fsdp.sh": _LOSS,
    "rollout_correction/run_qwen2_5_7b_fsdp.sh": {"rewards.function"} | _LOSS,
    "rollout_correction/run_qwen2_5_7b_fsdp_multi_rs.sh": {
        "algorithm.old_logprobs",
        "rewards.function",
    },
    "sft/gsm8k/run_qwen3_5_397b_a17b_megatron.sh": {"data.url", "rewards.function"},
    "sft/gsm8k/run_qwen_megatron_fsdp.sh": {"data.url"},
    "sft/vlm/run_qwen3_vl_2b_fsdp.sh": {"data.url", "rewards.function"},
    "tuning/lora/run_qwen2_5_vl_7b_fsdp.sh": {"trainer.lora.targets"},
    "tuning/lora/run_qwen3_30b_a3b_megatron.sh": {"trainer.backend"},
}
"""Keys that a script leaves open: what it trains by, or with, that has no counterpart."""


def recorded_lists():
    recorded = json.loads((FILES / "verl_words.json").read_text())
    return {
        name: [recorded["words"][place] for place in places]
        for name, places in recorded["scripts"].items()
    }


@pytest.mark.parametrize(
    "every", [pytest.param(12), pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_verls_own_examples_become_configurations_with_every_option_accounted_for(
    tmp_path, monkeypatch, every
):
    """The words are those that bash passed: tests/commands/shell_oracle.py."""
    monkeypatch.setenv("HOME", "/home/me")
    lists = recorded_lists()
    assert len(lists) > 80
    for name, words in [*lists.items()][::every]:
        done = migrate(words, 17_000)
        given = {word.partition("=")[0].lstrip("+") for word in words if word[0] not in "~-"}
        missing = [one for one in given if not any(key.startswith(one) for key in done.fates)]
        assert not missing, name
        path = tmp_path / "migrated.yaml"
        path.write_text(done.text)
        asked = {key for key in DECISIONS if f"TO DECIDE: {key}: " in done.report}
        assert asked == OPEN_KEYS.get(name, set()), name
        decided = [f"{key}={DECISIONS[key]}" for key in asked]
        assert load_config_file(path, decided).config.run.steps > 0, name


def test_source_is_not_followed_and_named(tmp_path):
    done, _ = questions_of(tmp_path, f"source env.sh\n{CALL} {OPTION}=8\n")
    assert "line 1: `source env.sh` is not followed" in done.report


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_number_of_nothing_is_a_message_and_no_traceback(value):
    names = [
        "data.train_batch_size", "trainer.nnodes", "trainer.n_gpus_per_node", "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.rollout.tensor_model_parallel_size", "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size", "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.ppo_epochs", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "trainer.total_epochs",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size",
        "algorithm.rollout_correction.rollout_is_threshold",
        "actor_rollout_ref.actor.clip_ratio",
    ]  # fmt: skip
    for name in names:
        for backend in ("fsdp", "megatron"):
            words = [
                f"{name}={value}", f"actor_rollout_ref.actor.strategy={backend}",
                "actor_rollout_ref.actor.optim.min_lr=1e-7",
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_rs=token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold=0_2",
            ]  # fmt: skip
            assert migrate(words, 100).text
