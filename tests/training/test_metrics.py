"""The step log of a resumed run reads as if the run had never stopped."""

from lightninglm.training.metrics import MetricsLogger, read_metrics


def row(step):
    return {"step": step, "loss": 1 / step, "tokens_per_second": 10.0, "learning_rate": {"rest": 1e-3}}


def test_a_resumed_log_drops_later_steps_and_a_torn_last_line(tmp_path):
    logger = MetricsLogger(tmp_path, "seed", step=0, total_steps=10)
    for step in range(1, 8):
        logger.step(row(step))
    logger.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "loss": 0.1')  # killed while writing
    logger = MetricsLogger(tmp_path, "seed", step=5, total_steps=10)
    for step in range(6, 11):
        logger.step(row(step))
    logger.close()
    assert read_metrics(tmp_path) == [row(step) for step in range(1, 11)]


def test_a_stage_without_a_log_has_no_steps(tmp_path):
    assert read_metrics(tmp_path) == []
