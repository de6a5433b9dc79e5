DROP FUNCTION duly.commit_outcome(text);
DROP FUNCTION duly.commit_mark();
