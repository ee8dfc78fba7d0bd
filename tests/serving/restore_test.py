"""Restored pages are worth their place: cheaper than computing them again."""

import pytest
from absl.testing import parameterized
from benchmark_suite import suite_request
from small_engines import check_empty, make_engine

from glm_jax.benchmarks import load_suite
from glm_jax.serving import restore_time


class RestoreTest(parameterized.TestCase):
  def test_known_fault_48_a_host_hit_is_cheaper_than_recompute(self):
    """The pages come back, from pinned memory, and one row runs."""
    engine = make_engine(host_cache_bytes=1 << 26, debug=False)
    rows = engine.runner.rows
    before = rows['prefill']
    found = restore_time.measure(engine, 250, repeats=3)
    assert found.pages == 3 and found.pinned
    assert found.page_bytes == engine.runner.record_bytes
    assert rows['prefill'] - before == 3 * (250 + 250 - 192)
    assert found.ratio > 1, found
    check_empty(engine)

  @pytest.mark.long
  def test_the_suite_measures_the_engine_in_this_process(self):
    suite = load_suite('serve')
    request = suite_request(select=('restore', 'tuning'))
    report = suite.run(request, lambda *_: None)
    cases = [(row.case, row.system) for row in report.rows]
    assert cases[:2] == [('restore', 'restored'), ('restore', 'recomputed')]
    assert len(cases) == 2 + 2 * 2 * 2
    restored = report.rows[0].details
    assert restored['speedup'] > 1 and restored['pinned']
    assert 'speedup' in report.table(suite.COLUMNS['run'])
