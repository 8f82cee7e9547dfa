import pytest
def test_a(): pass
@pytest.mark.skip(reason="x")
def test_b(): pass
@pytest.mark.xfail
def test_c(): assert 0
