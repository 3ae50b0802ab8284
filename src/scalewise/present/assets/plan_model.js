// The planning model, the same closed formulas as plan/model.py; a test holds the two against each other.
const planModel = (() => {
  const WORTH_NAMING = 1.05;

  const races = (inputs, workers) => workers > 1 && (inputs.race_samples ?? null) !== null;

  const gainOf = (inputs, workers) => {
    if (races(inputs, workers)) return workers / Math.max(1, inputs.race_samples * workers ** inputs.race_growth);
    if (inputs.critical_batch === null || inputs.critical_batch === undefined) return workers;
    const ratio = inputs.critical_batch / inputs.worker_batch;
    return (1 + ratio) / (1 + ratio / workers);
  };

  const stepsOf = (inputs, workers) => {
    const steps = inputs.single_steps / gainOf(inputs, workers);
    if (!races(inputs, workers)) return Math.max(1, Math.ceil(steps - 1e-9));
    return Math.max(1, Math.floor(steps + 0.5), Math.min(Math.floor(inputs.single_steps), inputs.race_least));
  };

  const rateOf = (inputs, workers, steps, gain) =>
    workers > 1 && (inputs.race_steps ?? 0) > 0 ? Math.min(Math.max(0.05 * Math.sqrt(200 / steps), 0.01), 0.08) : inputs.lr * gain ** inputs.lr_power;

  const computeSeconds = (inputs, largest) => {
    const parts = largest ? Math.ceil(inputs.worker_batch / largest) : 1;
    return (parts * inputs.step_seconds + inputs.sample_seconds * inputs.worker_batch) / inputs.device_speed;
  };

  const reductionSeconds = (latency, bandwidth, bytes, processes) => {
    const rounds = 2 * (processes - 1);
    return rounds * latency + (rounds / processes) * bytes / bandwidth;
  };

  const devicesUsed = (workers, devices) => {
    let most = 1;
    for (let one = 1; one * one <= workers; one += 1)
      if (workers % one === 0) for (const divisor of [one, workers / one]) if (divisor <= devices) most = Math.max(most, divisor);
    return most;
  };

  const communicationSeconds = (inputs, workers) => {
    const bytes = inputs.parameter_bytes, used = devicesUsed(workers, inputs.node_devices);
    const inside = reductionSeconds(inputs.node_latency_seconds, inputs.node_bytes_per_second, bytes, used);
    return inside + reductionSeconds(inputs.latency_seconds, inputs.bytes_per_second, bytes, workers / used);
  };

  const stepSeconds = (inputs, workers) => {
    const compute = computeSeconds(inputs, inputs.largest_worker_batch);
    const communication = communicationSeconds(inputs, workers);
    const longer = Math.max(compute, communication), shorter = Math.min(compute, communication);
    const together = longer * (1 + (shorter / longer) ** inputs.overlap) ** (1 / inputs.overlap);
    const rate = inputs.input_samples_per_second;
    return Math.max(together, rate ? inputs.worker_batch / rate : 0);
  };

  const limit = (inputs, workers) => {
    const now = stepSeconds(inputs, workers);
    const all = {
      noise: workers / gainOf(inputs, workers),
      memory: now / stepSeconds({ ...inputs, largest_worker_batch: null }, workers),
      link: now / stepSeconds(inputs, 1),
      input: now / stepSeconds({ ...inputs, input_samples_per_second: null }, workers),
    };
    const worst = Object.keys(all).reduce((best, name) => (all[name] > all[best] ? name : best));
    return all[worst] > WORTH_NAMING ? worst : "compute";
  };

  const row = (inputs, workers) => {
    const steps = stepsOf(inputs, workers), each = stepSeconds(inputs, workers), gain = gainOf(inputs, workers);
    const one = stepsOf(inputs, 1) * stepSeconds(inputs, 1), batch = workers * inputs.worker_batch;
    const price = inputs.price_per_hour, time = (steps + (workers > 1 ? inputs.race_steps ?? 0 : 0)) * each;
    return {
      workers, global_batch: batch, lr: rateOf(inputs, workers, steps, gain), steps, samples: steps * batch,
      seconds: time, cost: price === null || price === undefined ? null : workers * time / 3600 * price,
      accuracy: inputs.accuracy ?? null, efficiency: one / (workers * time), limit: limit(inputs, workers),
      extrapolated: batch > inputs.measured_global_batch, gain, step_seconds: each,
      throughput_efficiency: stepSeconds(inputs, 1) / each,
    };
  };

  return { row };
})();
globalThis.scalewisePlan = planModel;
