"use strict";
// The scores after flags made in the page; those before are from scores.py. An accuracy over independent items gets
// Wilson's interval, as there. Other intervals (clusters, categories, held-out text) are those before, scaled by the
// standard error of independent items; `smalti eval read` computes them anew.
const Z = 1.959963984540054;

function wilson(right, n) {
  const share = right / n, shrink = 1 + Z * Z / n, middle = (share + Z * Z / (2 * n)) / shrink;
  const half = Z * Math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / shrink;
  return [right === 0 ? 0 : Math.max(0, middle - half), right === n ? 1 : Math.min(1, middle + half)];
}

const sum = values => values.reduce((total, value) => total + value, 0);

function accuracy(items) {
  const graded = items.filter(item => item.correct != null), categories = new Map();
  for (const { category, correct } of graded) {
    const [right, n] = categories.get(category) || [0, 0];
    categories.set(category, [right + correct, n + 1]);
  }
  const parts = [...categories.values()].map(([right, n]) => [right / n, n]), right = sum(graded.map(item => +item.correct));
  return {
    n: graded.length, value: sum(parts.map(([share]) => share)) / parts.length,
    error: Math.sqrt(sum(parts.map(([share, n]) => share * (1 - share) / n))) / parts.length,
    independent: parts.length === 1 && !graded.some(item => item.cluster != null),
    interval: graded.length ? wilson(right, graded.length) : null,
  };
}

function bitsPerByte(items) {
  const documents = items.filter(item => item.nats != null && item.size != null), n = documents.length;
  const total = sum(documents.map(item => item.size)), bits = item => item.nats / Math.LN2;
  const value = sum(documents.map(bits)) / total;
  const squares = sum(documents.map(item => (bits(item) - value * item.size) ** 2));
  return { n: total ? n : 0, value, error: n > 1 ? Math.sqrt(n / (n - 1) * squares) / total : 0 };
}

// An average after the flags: the differences of its tasks by their weights; the distances to both ends of their intervals
// are propagated, as in statistics/averages.py. `before`: {value, interval, weights}.
function averageAfter(before, tasks) {
  const members = Object.entries(before.weights).map(([task, weight]) => ({ weight, old: tasks.get(task).before, score: tasks.get(task).after || tasks.get(task).before }));
  const value = before.value + sum(members.map(({ weight, old, score }) => weight * (score.value - old.value)));
  if (!members.every(({ score }) => score.interval)) return { ...before, value, interval: null };
  const reach = end => Math.hypot(...members.map(({ weight, score }) => weight * (score.interval[end] - score.value)));
  return { ...before, value, interval: [value - reach(0), value + reach(1)] };
}

// The score of the remaining items; `before`: {metric, value, n, interval} of all items, from Python.
function scoreAfter(before, all, remaining) {
  const score = before.metric === "accuracy" ? accuracy : bitsPerByte, after = score(remaining);
  if (!after.n) return null;
  const { value, n } = after, scale = after.error / score(all).error;
  if (after.independent) return { value, n, interval: after.interval };
  if (!before.interval) return { value, n, interval: null };
  if (!(scale > 0 && scale < Infinity)) return { value, n, interval: after.interval || null }; // there is no error to scale
  const [low, high] = before.interval.map(end => value + scale * (end - before.value));
  return { value, n, interval: before.metric === "accuracy" ? [Math.max(0, low), Math.min(1, high)] : [low, high] };
}
