//! The metrics of pools in `nacre metrics`. Pure.

use super::{escape, fraction, head, histogram, sample};
use nacre_admin::{
    counted::DeviceRequest,
    pool::{DeviceFigures, Phase, Status},
};

/// A metric of a pool: its name, its kind, its help, and its value.
type Family = (&'static str, &'static str, &'static str, fn(&Status) -> Option<String>);

/// Returns a result of the last scrub; nothing where there was none.
fn scrubbed(pool: &Status, value: u64) -> Option<String> {
    (pool.scrub.phase != Phase::Never).then(|| value.to_string())
}

const FAMILIES: &[Family] = &[
    ("nacre_pool_size_bytes", "gauge", "Room in all.", |pool| Some(pool.figures.size.to_string())),
    ("nacre_pool_allocated_bytes", "gauge", "Room in use.", |pool| Some(pool.figures.allocated.to_string())),
    ("nacre_pool_free_bytes", "gauge", "Room that is free.", |pool| Some(pool.figures.free.to_string())),
    ("nacre_pool_freeing_bytes", "gauge", "Room in use that is about to be freed.", |pool| {
        Some(pool.figures.freeing.to_string())
    }),
    ("nacre_pool_fragmentation_ratio", "gauge", "Free room in slots that hold something, 0 to 1.", |pool| {
        Some(fraction(pool.figures.fragmentation, 2))
    }),
    ("nacre_pool_damaged_frames", "gauge", "Frames that are lost.", |pool| Some(pool.damaged.to_string())),
    ("nacre_pool_txg", "gauge", "The last transaction group that is durable.", |pool| {
        Some(pool.figures.txg.to_string())
    }),
    ("nacre_pool_held_bytes", "gauge", "What memory holds that is not durable yet.", |pool| {
        Some(pool.figures.engine.held.to_string())
    }),
    ("nacre_pool_commit_last_seconds", "gauge", "How long the last commit of a transaction group took.", |pool| {
        Some(fraction(pool.figures.engine.commit_last, 6))
    }),
    ("nacre_pool_cache_bytes", "gauge", "What the cache holds.", |pool| Some(pool.figures.engine.cache.0.to_string())),
    ("nacre_pool_cache_limit_bytes", "gauge", "What the cache may hold.", |pool| {
        Some(pool.figures.engine.cache.1.to_string())
    }),
    ("nacre_pool_scrub_running", "gauge", "Whether a scrub runs.", |pool| {
        Some(u64::from(pool.scrub.phase == Phase::Running).to_string())
    }),
    ("nacre_pool_scrub_end_timestamp_seconds", "gauge", "When the last scrub looked at everything.", |pool| {
        (pool.scrub.phase == Phase::Finished).then(|| pool.scrub.ended.to_string())
    }),
    ("nacre_pool_scrub_age_seconds", "gauge", "Time since then.", |pool| {
        (pool.scrub.phase == Phase::Finished).then(|| pool.figures.now.saturating_sub(pool.scrub.ended).to_string())
    }),
    ("nacre_pool_scrub_errors", "gauge", "Frames that the last scrub found lost.", |pool| {
        scrubbed(pool, pool.scrub.errors)
    }),
    ("nacre_pool_scrub_repaired_bytes", "gauge", "What it has written anew from another copy.", |pool| {
        scrubbed(pool, pool.scrub.repaired)
    }),
    ("nacre_pool_scrub_examined_bytes", "gauge", "What it has looked at.", |pool| scrubbed(pool, pool.scrub.examined)),
    ("nacre_pool_scrub_total_bytes", "gauge", "What there was to look at.", |pool| scrubbed(pool, pool.scrub.total)),
];

/// The states of a pool in the words of ZFS.
const STATES: [&str; 3] = ["ONLINE", "DEGRADED", "SUSPENDED"];

/// Returns the metric that reports whether the pools' processes are running.
pub fn up(pools: &[(String, bool)]) -> String {
    let mut text = String::new();
    if !pools.is_empty() {
        head(&mut text, "nacre_pool_up", "gauge", "Whether the process that owns an imported pool is there.");
    }
    for (name, up) in pools {
        sample(&mut text, "nacre_pool_up", &format!("pool=\"{}\"", escape(name)), if *up { "1" } else { "0" });
    }
    text
}

/// Returns the metrics of pools as Prometheus text.
pub fn text(pools: &[Status]) -> String {
    let mut text = String::new();
    if pools.is_empty() {
        return text;
    }
    for (name, kind, help, value) in FAMILIES {
        let values: Vec<_> = pools.iter().filter_map(|pool| Some((labels(pool), value(pool)?))).collect();
        if !values.is_empty() {
            head(&mut text, name, kind, help);
        }
        values.iter().for_each(|(labels, value)| sample(&mut text, name, labels, value));
    }
    health(&mut text, pools);
    cache(&mut text, pools);
    const COMMITS: &str = "nacre_pool_commit_duration_seconds";
    head(&mut text, COMMITS, "histogram", "How long commits of transaction groups took.");
    for pool in pools {
        let engine = &pool.figures.engine;
        histogram(
            &mut text,
            COMMITS,
            &labels(pool),
            &buckets(&engine.commits, 1000),
            engine.commit_time.saturating_mul(1000),
        );
    }
    devices(&mut text, pools);
    text
}

fn labels(pool: &Status) -> String {
    format!("pool=\"{}\"", escape(&pool.figures.name))
}

fn of_device(pool: &Status, device: &DeviceFigures) -> String {
    format!("{},device=\"{}\"", labels(pool), escape(device.name()))
}

/// Converts a histogram over powers of two to upper bounds in nanoseconds; two powers make a
/// bucket, which limits their number. The last bucket has no bound.
fn buckets(places: &[u64], unit: u64) -> Vec<(Option<u64>, u64)> {
    let mut buckets = Vec::new();
    let last = places.len().saturating_sub(1);
    for (pair, counts) in places.chunks(2).enumerate() {
        let top = pair * 2 + counts.len();
        let bound = u32::try_from(top).ok().and_then(|power| 1_u64.checked_shl(power)).map(|bound| (bound - 1) * unit);
        buckets.push((bound.filter(|_| top <= last), counts.iter().sum()));
    }
    buckets
}

fn health(text: &mut String, pools: &[Status]) {
    const NAME: &str = "nacre_pool_health";
    head(text, NAME, "gauge", "The state of a pool: 1 for the one that it is in.");
    for pool in pools {
        for state in STATES {
            let is = u64::from(pool.figures.health == state);
            sample(text, NAME, &format!("{},state=\"{state}\"", labels(pool)), &is.to_string());
        }
    }
}

fn cache(text: &mut String, pools: &[Status]) {
    for (name, help, missed) in [
        ("nacre_pool_cache_hits_total", "What was found in the cache.", false),
        ("nacre_pool_cache_misses_total", "What had to be read.", true),
    ] {
        head(text, name, "counter", help);
        for pool in pools {
            let engine = &pool.figures.engine;
            for (kind, (hits, misses)) in [("node", engine.nodes), ("content", engine.content)] {
                let value = if missed { misses } else { hits };
                sample(text, name, &format!("{},kind=\"{kind}\"", labels(pool)), &value.to_string());
            }
        }
    }
}

/// A metric of each device: name, kind, help, and values with a label each.
type OfDevice = (&'static str, &'static str, &'static str, fn(&DeviceFigures) -> Vec<(&'static str, u64)>);

const OF_DEVICES: &[OfDevice] = &[
    ("nacre_pool_device_size_bytes", "gauge", "Room for segments on a device.", |device| vec![("", device.size)]),
    ("nacre_pool_device_allocated_bytes", "gauge", "What lives on a device.", |device| vec![("", device.allocated)]),
    ("nacre_pool_device_up", "gauge", "Whether a device is there, and no error of it is known.", |device| {
        vec![("", u64::from(device.health() == "ONLINE" && matches!(device.state.as_str(), "" | "ONLINE")))]
    }),
    ("nacre_pool_device_errors_total", "counter", "What failed on a device since errors were cleared.", |device| {
        let counts = device.counts;
        vec![
            ("kind=\"read\"", counts.read_errors),
            ("kind=\"write\"", counts.write_errors),
            ("kind=\"checksum\"", counts.checksum_errors),
        ]
    }),
    ("nacre_pool_device_bytes_total", "counter", "What was read and written.", |device| {
        vec![("operation=\"read\"", device.counts.read_bytes), ("operation=\"write\"", device.counts.written_bytes)]
    }),
];

fn devices(text: &mut String, pools: &[Status]) {
    for (name, kind, help, values) in OF_DEVICES {
        head(text, name, kind, help);
        for pool in pools {
            for device in &pool.figures.devices {
                for (label, value) in values(device) {
                    let comma = if label.is_empty() { "" } else { "," };
                    sample(text, name, &format!("{}{comma}{label}", of_device(pool, device)), &value.to_string());
                }
            }
        }
    }
    const TIMES: &str = "nacre_pool_device_duration_seconds";
    head(text, TIMES, "histogram", "How long requests to a device took.");
    for pool in pools {
        for device in &pool.figures.devices {
            let counts = device.counts;
            for (request, places) in DeviceRequest::ALL.iter().zip(&device.spread.times) {
                let (word, time) = match request {
                    DeviceRequest::Read => ("read", counts.read_time),
                    DeviceRequest::Write => ("write", counts.write_time),
                    DeviceRequest::Sync => ("sync", counts.sync_time),
                    // The total time of trims is not counted.
                    DeviceRequest::Trim => continue,
                };
                let labels = format!("{},operation=\"{word}\"", of_device(pool, device));
                histogram(text, TIMES, &labels, &buckets(places, 1), time);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_admin::{
        counted::Counts,
        pool::{Figures, ScrubReport, figures::EngineFigures},
    };

    #[test]
    fn a_pool_tells_what_it_knows() {
        let device = DeviceFigures {
            path: "/dev/\"x\n".to_owned(),
            counts: Counts { write_errors: 3, ..Counts::default() },
            ..DeviceFigures::default()
        };
        let engine = EngineFigures {
            commits: vec![1, 0, 2, 0, 4],
            commit_time: 1_500_000,
            nodes: (7, 1),
            ..EngineFigures::default()
        };
        let figures = Figures {
            name: "tank".to_owned(),
            fragmentation: 7,
            health: "DEGRADED".to_owned(),
            now: 100,
            devices: vec![device],
            engine,
            ..Figures::default()
        };
        let scrub = ScrubReport { phase: Phase::Finished, ended: 40, ..ScrubReport::default() };
        let text = text(&[Status { figures, scrub, ..Status::default() }]);
        for line in [
            "nacre_pool_fragmentation_ratio{pool=\"tank\"} 0.07",
            "nacre_pool_health{pool=\"tank\",state=\"DEGRADED\"} 1",
            "nacre_pool_health{pool=\"tank\",state=\"ONLINE\"} 0",
            "nacre_pool_scrub_age_seconds{pool=\"tank\"} 60",
            "nacre_pool_cache_misses_total{pool=\"tank\",kind=\"node\"} 1",
            "nacre_pool_commit_duration_seconds_bucket{pool=\"tank\",le=\"0.000003000\"} 1",
            "nacre_pool_commit_duration_seconds_bucket{pool=\"tank\",le=\"0.000015000\"} 3",
            "nacre_pool_commit_duration_seconds_bucket{pool=\"tank\",le=\"+Inf\"} 7",
            "nacre_pool_commit_duration_seconds_sum{pool=\"tank\"} 1.500000000",
            "nacre_pool_device_errors_total{pool=\"tank\",device=\"/dev/\\\"x\\n\",kind=\"write\"} 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert_eq!(super::text(&[]), "");
    }
}
