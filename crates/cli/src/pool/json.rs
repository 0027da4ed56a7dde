//! `nacre pool list`, `get` and `status` as JSON, in the form of OpenZFS 2.3: pools by name,
//! devices as objects below the device `root`.
//!
//! Numbers are text, for people or (`-p`) exactly; with `--json-int` they are numbers.

use super::{
    called,
    form::{PoolForm, json_head},
    list, status,
    tree::{self, ROOT, Vdev},
    vdevs,
};
use nacre_admin::pool::{
    DeviceFigures, Figures, GroupFigures, Phase, ReshapeReport, Reshaping, ScrubReport, Status, properties,
};
use nacre_daemon::{failure::Failure, pool::dates};
use nacre_pool::properties::size::human_bytes;
use serde_json::{Map, Value, json};

fn exactly(number: u64, form: PoolForm) -> Value {
    if form.integers { json!(number) } else { json!(number.to_string()) }
}

fn bytes(number: u64, form: PoolForm) -> Value {
    if form.exact { exactly(number, form) } else { json!(human_bytes(number)) }
}

fn time(at: u64, form: PoolForm) -> Value {
    match (form.exact, at) {
        (true, at) => exactly(at, form),
        (false, 0) => json!("-"),
        (false, at) => json!(dates::long(at)),
    }
}

fn property(name: &str, value: &properties::Value, form: PoolForm) -> Value {
    let source = match value.source {
        "local" => "LOCAL",
        "default" => "DEFAULT",
        _ => "NONE",
    };
    // User properties are text, whatever they contain.
    let number = value.exact.parse::<u64>().ok().filter(|_| form.integers && !name.contains(':') && name != "comment");
    let shown = number.map_or_else(|| json!(list::shown(value, form)), |number| json!(number));
    json!({ "value": shown, "source": { "type": source, "data": "-" } })
}

/// Returns the fields of a pool that all answers have. The two versions are those of ZFS pools with
/// feature flags.
fn head(pool: &Figures, form: PoolForm) -> Map<String, Value> {
    let fields = [
        ("name", json!(pool.name)),
        ("state", json!(pool.health)),
        ("pool_guid", exactly(pool.guid, form)),
        ("txg", exactly(pool.txg, form)),
        ("spa_version", exactly(5000, form)),
        ("zpl_version", exactly(5, form)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn whole(command: &str, pools: impl Iterator<Item = (String, u64, Map<String, Value>)>, form: PoolForm) -> String {
    let key = |name, guid: u64| if form.by_guid { guid.to_string() } else { name };
    let pools: Map<String, Value> =
        pools.map(|(name, guid, fields)| (key(name, guid), Value::Object(fields))).collect();
    json!({ "output_version": json_head(command), "pools": pools }).to_string() + "\n"
}

/// Returns the class of a vdev.
fn class_of(pool: &Figures, vdev: Vdev<'_>) -> &'static str {
    let own = tree::tops(pool).into_iter().find(|top| {
        let (all, one) = (top.vdev.devices(pool), vdev.devices(pool));
        one.iter().any(|device| all.iter().any(|there| std::ptr::eq(*there, *device)))
    });
    let part = own.and_then(|top| tree::PARTS.into_iter().find(|(class, _)| *class == top.class));
    part.and_then(|(_, heading)| heading).unwrap_or("normal")
}

/// Returns the fields of a device.
fn device_head(pool: &Figures, device: &DeviceFigures, form: PoolForm) -> Map<String, Value> {
    let fields = [
        ("name", json!(device.name())),
        ("vdev_type", json!(kind_of(device))),
        ("guid", exactly(device.guid, form)),
        ("path", json!(device.path)),
        ("class", json!(class_of(pool, Vdev::Leaf(device)))),
        ("state", json!(status::device_state(pool, device))),
    ];
    let asked = device.requests.map(|requests| ("requests", json!(requests)));
    let month = device.requests.and_then(|_| pool.month_cost());
    let cost = month.map(|month| ("month_cost", json!({"stored": month.stored, "requests": month.requests})));
    let silence = device.silence.as_ref().map(|(seconds, why)| ("silence", json!({"seconds": seconds, "why": why})));
    fields.into_iter().chain(asked).chain(cost).chain(silence).map(|(name, value)| (name.to_owned(), value)).collect()
}

fn kind_of(device: &DeviceFigures) -> &'static str {
    match device.requests {
        Some(_) => "bucket",
        None if called::is_disk(&device.path) => "disk",
        None => "file",
    }
}

/// Returns the fields of a group.
fn group_head(pool: &Figures, group: &GroupFigures) -> Map<String, Value> {
    let fields = [
        ("name", json!(group.name)),
        ("vdev_type", json!(group.kind)),
        ("class", json!(class_of(pool, Vdev::Group(group)))),
        ("state", json!(Vdev::Group(group).state(pool))),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn vdev_head(pool: &Figures, vdev: Vdev<'_>, form: PoolForm) -> Map<String, Value> {
    match vdev {
        Vdev::Root => root_head(pool, ROOT, form),
        Vdev::Group(group) => group_head(pool, group),
        Vdev::Pair(_, _, beside) => {
            let fields = [
                ("name", json!(vdev.name())),
                ("vdev_type", json!(beside.role)),
                ("class", json!(class_of(pool, vdev))),
                ("state", json!(vdev.state(pool))),
            ];
            fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
        }
        Vdev::Leaf(device) => device_head(pool, device, form),
    }
}

/// Returns the top-level vdevs of a class with their children nested. `tell` returns the fields of
/// each from its depth and the vdev.
fn nested(
    pool: &Figures,
    class: &str,
    wanted: impl Fn(&DeviceFigures) -> bool,
    tell: impl Fn(usize, Vdev<'_>) -> Map<String, Value>,
) -> Map<String, Value> {
    type Tell<'t> = &'t dyn Fn(usize, Vdev<'_>) -> Map<String, Value>;
    /// Returns a vdev with its children; `None` where none of its devices is wanted.
    fn one(
        depth: usize,
        (vdev, below): (Vdev<'_>, Vec<Vdev<'_>>),
        wanted: &dyn Fn(&DeviceFigures) -> bool,
        tell: Tell<'_>,
    ) -> Option<(String, Value)> {
        let below = match vdev {
            Vdev::Leaf(device) => {
                return wanted(device).then(|| (vdev.name().into_owned(), Value::Object(tell(depth, vdev))));
            }
            Vdev::Pair(_, device, beside) => vec![Vdev::Leaf(device), Vdev::Leaf(beside)],
            _ => below,
        };
        let below: Map<String, Value> =
            below.into_iter().filter_map(|vdev| one(depth + 1, (vdev, Vec::new()), wanted, tell)).collect();
        let mut fields = tell(depth, vdev);
        let shown = !below.is_empty();
        fields.insert("vdevs".to_owned(), Value::Object(below));
        shown.then(|| (vdev.name().into_owned(), Value::Object(fields)))
    }
    let top = |top: tree::Top<'_>| one(1, (top.vdev, top.below), &wanted, &tell);
    tree::tops(pool).into_iter().filter(|top| top.class == class).filter_map(top).collect()
}

/// Formats pools with these properties; with `verbose` their devices too.
///
/// # Errors
/// A property that does not exist.
pub fn properties(
    command: &str,
    pools: &[Figures],
    form: PoolForm,
    verbose: bool,
    names: impl Fn(&Figures) -> Vec<String>,
) -> Result<String, Failure> {
    let mut all = Vec::new();
    for pool in pools {
        let (names, mut values) = (names(pool), Map::new());
        for name in &names {
            let value = list::value(pool, name).map_err(|error| list::wrong(&error))?;
            if name != "name" {
                values.insert(name.clone(), property(name, &value, form));
            }
        }
        let mut fields = head(pool, form);
        fields.insert("type".to_owned(), json!("POOL"));
        fields.insert("properties".to_owned(), Value::Object(values));
        if verbose {
            let of_vdev = |depth, vdev: Vdev<'_>| {
                let shown = names.iter().filter(|name| !["name", "altroot"].contains(&name.as_str()));
                let values: Map<String, Value> = shown
                    .map(|name| (name.clone(), property(name, &list::shown_value(pool, depth, vdev, name), form)))
                    .collect();
                let mut fields = vdev_head(pool, vdev, form);
                fields.insert("properties".to_owned(), Value::Object(values));
                fields
            };
            for (class, heading) in tree::PARTS {
                let part = nested(pool, class, |_| true, of_vdev);
                if heading.is_none() || !part.is_empty() {
                    fields.insert(heading.unwrap_or("vdevs").to_owned(), Value::Object(part));
                }
            }
        }
        all.push((pool.name.clone(), pool.guid, fields));
    }
    Ok(whole(command, all.into_iter(), form))
}

/// Formats devices of a pool with these properties.
pub fn vdevs(pool: &Figures, vdevs: &[Vdev<'_>], names: &[String], form: PoolForm) -> String {
    let one = |vdev: &Vdev<'_>| {
        let mut fields = vdev_head(pool, *vdev, form);
        let values = names.iter().filter(|name| *name != "name");
        let values: Map<String, Value> =
            values.map(|name| (name.clone(), property(name, &vdevs::value(pool, *vdev, name), form))).collect();
        fields.insert("type".to_owned(), json!("VDEV"));
        fields.insert("properties".to_owned(), Value::Object(values));
        (vdev.name().into_owned(), Value::Object(fields))
    };
    let all: Map<String, Value> = vdevs.iter().map(one).collect();
    json!({ "output_version": json_head("get"), "vdevs": all }).to_string() + "\n"
}

/// Returns the fields of the root vdev.
fn root_head(pool: &Figures, name: &str, form: PoolForm) -> Map<String, Value> {
    let fields = [
        ("name", json!(name)),
        ("vdev_type", json!("root")),
        ("guid", exactly(pool.guid, form)),
        ("class", json!("normal")),
        ("state", json!(if pool.health == "SUSPENDED" { "UNAVAIL" } else { &pool.health })),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Returns the running or last topology change: in the fields of ZFS where it has them, and in
/// `reshape`, which describes all kinds.
fn reshape(report: &ReshapeReport, form: PoolForm) -> Vec<(String, Value)> {
    let (state, state_there) = match report.phase {
        Phase::Never => return Vec::new(),
        Phase::Running => ("RUNNING", "SCANNING"),
        Phase::Paused => ("PAUSED", "SCANNING"),
        Phase::Finished => ("FINISHED", "FINISHED"),
        Phase::Canceled => ("CANCELED", "CANCELED"),
    };
    let (started, total) = (time(report.started, form), report.moved + report.left);
    let ended = time(if state_there == "SCANNING" { 0 } else { report.ended }, form);
    let mut fields = vec![(
        "reshape".to_owned(),
        json!({
            "kind": report.kind,
            "what": report.what,
            "state": state,
            "start_time": started,
            "end_time": ended,
            "paused": time(if state == "PAUSED" { report.ended } else { 0 }, form),
            "moved": bytes(report.moved, form),
            "left": bytes(report.left, form),
            "speed": bytes(report.speed(), form),
            "rate": bytes(report.rate, form),
            "held_up": report.held_up,
        }),
    )];
    let (all, done) = (bytes(total, form), bytes(report.moved, form));
    match report.kind {
        Reshaping::Removal => fields.push((
            "removal_stats".to_owned(),
            json!({
                "name": report.what, "state": state_there, "removing_vdev": report.what, "start_time": started,
                "end_time": ended, "to_copy": all, "copied": done, "mapping_memory": bytes(0, form),
            }),
        )),
        Reshaping::Expansion => fields.push((
            "raidz_expand_stats".to_owned(),
            json!({
                "name": report.what, "state": state_there, "expanding_vdev": report.what, "start_time": started,
                "end_time": ended, "to_reflow": all, "reflowed": done, "waiting_for_resilver": exactly(0, form),
            }),
        )),
        Reshaping::Conversion | Reshaping::Rebalance => {}
    }
    fields
}

/// Formats the health of pools.
pub fn status(all: &[Status], shown: &status::StatusView) -> String {
    let form = shown.form;
    let pools = all.iter().map(|status| {
        let figures = &status.figures;
        let mut fields = head(figures, form);
        fields.extend(status::advice(status).into_iter().map(|(name, words)| (name.to_owned(), json!(words))));
        // Whichever of scrub and resilver began last.
        let resilvered = status.resilver.started > status.scrub.started;
        let (last, function) = if resilvered { (&status.resilver, "RESILVER") } else { (&status.scrub, "SCRUB") };
        fields.extend(scan(last, function, form).map(|scan| ("scan_stats".to_owned(), scan)));
        for (class, heading) in tree::PARTS {
            let part = tree(figures, class, shown);
            if heading.is_none() || !part.is_empty() {
                fields.insert(heading.unwrap_or("vdevs").to_owned(), Value::Object(part));
            }
        }
        let spares: Map<String, Value> = tree::spares(figures)
            .map(|spare| {
                let mut fields = device_head(figures, spare, form);
                fields.insert("class".to_owned(), json!("spare"));
                fields.insert("state".to_owned(), json!(tree::spare_state(spare)));
                (spare.name().to_owned(), Value::Object(fields))
            })
            .collect();
        if !spares.is_empty() {
            fields.insert("spares".to_owned(), Value::Object(spares));
        }
        fields.insert("error_count".to_owned(), exactly(status.damaged, form));
        if !status.names.is_empty() {
            fields.insert("errlist".to_owned(), json!(status.names));
        }
        // Fields that ZFS does not have.
        fields.extend(reshape(&status.reshape, form));
        fields.insert("suspended".to_owned(), json!(figures.suspended));
        fields.insert("process".to_owned(), json!(figures.process));
        fields.insert("since".to_owned(), json!(figures.since));
        fields.insert("read_only".to_owned(), json!(figures.read_only));
        if let Some(survives) = &figures.survives {
            fields.insert("survives".to_owned(), json!(survives));
        }
        if let Some(why) = &figures.ended {
            fields.insert("ended".to_owned(), json!(why));
        }
        if let Some(follows) = &figures.follows {
            fields.insert("follows".to_owned(), json!(follows));
        }
        (figures.name.clone(), figures.guid, fields)
    });
    whole("status", pools, form)
}

/// Returns the vdevs of a class; those for data are children of the root vdev. In flat form, the
/// devices also stand next to it and name their parents.
fn tree(figures: &Figures, class: &str, shown: &status::StatusView) -> Map<String, Value> {
    let form = shown.form;
    let room = |allocated, size, usable| {
        [
            ("alloc_space", bytes(allocated, form)),
            ("total_space", bytes(size, form)),
            ("def_space", bytes(usable, form)),
        ]
    };
    let errors = |[read, write, checksum]: [u64; 3]| {
        [
            ("read_errors", exactly(read, form)),
            ("write_errors", exactly(write, form)),
            ("checksum_errors", exactly(checksum, form)),
        ]
    };
    let own = |fields: &mut Map<String, Value>, more: Vec<(&str, Value)>| {
        fields.extend(more.into_iter().map(|(name, value)| (name.to_owned(), value)));
    };
    let parent = |device: &DeviceFigures| {
        let above = tree::above(figures, device);
        above.map_or_else(|| figures.name.clone(), |above| above.name().into_owned())
    };
    let device = |depth: usize, device: &DeviceFigures| {
        let mut fields = device_head(figures, device, form);
        if depth == 1 {
            own(&mut fields, room(device.allocated, device.size, device.size).into());
        } else {
            own(&mut fields, vec![("phys_space", bytes(device.length, form))]);
        }
        own(&mut fields, errors(status::errors(device)).into());
        own(&mut fields, vec![("slow_ios", exactly(0, form))]);
        if device.resilvering {
            own(&mut fields, vec![("resilvering", json!(true))]);
        }
        if device.leaving {
            own(&mut fields, vec![("removing", json!(true))]);
        }
        if shown.flat {
            own(&mut fields, vec![("parent", json!(parent(device)))]);
        }
        if shown.trim {
            let trim = &device.trim;
            let done = [
                ("trim_notsup", exactly(u64::from(trim.unsupported), form)),
                ("trim_state", json!(trim_state(trim.phase))),
                ("trim_time", time(trim.ended, form)),
                ("trimmed", bytes(trim.trimmed, form)),
                ("to_trim", bytes(trim.total, form)),
            ];
            own(&mut fields, done.into());
        }
        fields
    };
    let tell = |depth: usize, vdev: Vdev<'_>| match vdev {
        Vdev::Root => Map::new(),
        Vdev::Leaf(leaf) => device(depth, leaf),
        Vdev::Pair(..) => {
            let mut fields = vdev_head(figures, vdev, form);
            own(&mut fields, errors([0; 3]).into());
            fields
        }
        Vdev::Group(group) => {
            let mut fields = group_head(figures, group);
            own(&mut fields, room(group.allocated, group.size, group.usable).into());
            own(&mut fields, errors([0; 3]).into());
            fields
        }
    };
    let wanted = |device: &DeviceFigures| !shown.ill_devices || status::device_is_ill(figures, device);
    let mut root = root_head(figures, &figures.name, form);
    let usable = if figures.groups.is_empty() { figures.size } else { figures.usable };
    own(&mut root, room(figures.allocated, figures.size, usable).into());
    own(&mut root, errors(status::all_errors(figures)).into());
    let below = nested(figures, class, wanted, tell);
    let beside = tree::rows(figures, class).into_iter().filter(|(_, vdev)| match vdev {
        Vdev::Leaf(device) => wanted(device),
        _ => true,
    });
    let mut all: Map<String, Value> = match shown.flat {
        true => beside.map(|(depth, vdev)| (vdev.name().into_owned(), Value::Object(tell(depth, vdev)))).collect(),
        false if class.is_empty() => Map::new(),
        false => return below,
    };
    if class.is_empty() {
        root.insert("vdevs".to_owned(), Value::Object(below));
        all.insert(figures.name.clone(), Value::Object(root));
    }
    all
}

fn trim_state(phase: Phase) -> &'static str {
    match phase {
        Phase::Never => "UNTRIMMED",
        Phase::Running => "ACTIVE",
        Phase::Paused => "SUSPENDED",
        Phase::Canceled => "CANCELED",
        Phase::Finished => "COMPLETE",
    }
}

/// Returns the last scrub or resilver; `None` where there was none.
fn scan(scrub: &ScrubReport, function: &str, form: PoolForm) -> Option<Value> {
    let state = match scrub.phase {
        Phase::Never => return None,
        Phase::Running | Phase::Paused => "SCANNING",
        Phase::Finished => "FINISHED",
        Phase::Canceled => "CANCELED",
    };
    let paused = if scrub.phase == Phase::Paused { scrub.ended } else { 0 };
    let ended = if state == "SCANNING" { 0 } else { scrub.ended };
    Some(json!({
        "function": function, "state": state, "start_time": time(scrub.started, form), "end_time": time(ended, form),
        "to_examine": bytes(scrub.total, form), "examined": bytes(scrub.examined, form), "skipped": bytes(0, form),
        "processed": bytes(scrub.repaired, form), "errors": exactly(scrub.errors, form), "bytes_per_scan": bytes(scrub.examined, form),
        "pass_start": time(scrub.started, form), "scrub_pause": time(paused, form), "scrub_spent_paused": exactly(0, form),
        "issued_bytes_per_scan": bytes(scrub.examined, form), "issued": bytes(scrub.examined, form), "elapsed_ms": exactly(scrub.elapsed, form),
    }))
}
