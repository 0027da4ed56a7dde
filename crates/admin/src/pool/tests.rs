//! Verbs on pools over a device in memory: scrub, damage, properties, history, refusals.

mod in_bucket;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_pool::FrameKind;
use nacre_pool::device::{Device, Simulator};
use nacre_pool::files::{NewInode, ParentView};
use nacre_pool::frames::{CompressionSetting, Frames, NewFrame, Owner, WriteStream};
use nacre_pool::rows::{FileType, InodeRow};
use nacre_pool::store::Access;

use super::*;
use crate::{NoMounts, Opening, Silent};

fn opening() -> Opening {
    let count = AtomicU64::new(1);
    let entropy = Arc::new(move || count.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed));
    Opening {
        host: (1, "here".to_owned()),
        entropy,
        cache: 32 << 20,
        altroot: None,
        accepts_older: true,
        alias: None,
        home: PathBuf::from("/"),
        state: None,
        kept: None,
        after: None,
        failing: Arc::default(),
    }
}

fn devices(device: &Arc<Simulator>) -> Vec<Arc<dyn Device>> {
    vec![Arc::clone(device) as Arc<dyn Device>]
}

fn create(device: &Arc<Simulator>) -> Imported {
    Imported::create(devices(device), &[], "tank", &[], opening()).unwrap()
}

fn open(device: &Arc<Simulator>, access: Access, name: Option<&str>) -> Result<Imported, Refusal> {
    Imported::open(devices(device), access, name, opening())
}

fn ask(pool: &Imported, request: PoolRequest) -> Result<PoolAnswer, Refusal> {
    run(pool, &NoMounts, request, &mut Silent)
}

fn status(pool: &Imported) -> Status {
    match ask(pool, PoolRequest::Status { names: true }).unwrap() {
        PoolAnswer::Status(status) => *status,
        other => panic!("{other:?}"),
    }
}

/// A file in the root directory whose content cannot be compressed.
fn write(pool: &Imported, name: &str, length: usize) {
    let dataset = pool.pool.dataset(pool.pool.root().unwrap()).unwrap();
    let files = dataset.files();
    let mut state = length as u64 | 1;
    let content: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(length)
    .collect();
    let root = files.root();
    if files.look_up(&root, name.as_bytes()).is_ok() {
        files.unlink(&root, name.as_bytes()).unwrap();
    }
    let born = |view: &ParentView| {
        Ok(NewInode { row: InodeRow::new(FileType::Regular, 0o644, view.now), target: None, attributes: Vec::new() })
    };
    let (inode, _) = files.make(&root, name.as_bytes(), b"", &born).unwrap();
    files.write(&inode, Some(0), &content).unwrap();
}

#[test]
fn a_scrub_finds_what_has_rotted() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    write(&pool, "victim", 200_000);
    ask(&pool, PoolRequest::Sync).unwrap();
    ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)).unwrap();
    ask(&pool, PoolRequest::AwaitScrub).unwrap();
    let clean = status(&pool);
    assert_eq!((clean.scrub.phase, clean.scrub.errors, clean.damaged), (Phase::Finished, 0, 0));
    assert!(clean.scrub.examined > 200_000);
    let PoolAnswer::Checked(found) = ask(&pool, PoolRequest::Check).unwrap() else { panic!() };
    assert_eq!(found.problems, 0);
    // The largest segment of data holds the file: a bit in its middle.
    let segment =
        pool.store.segments().into_iter().find(|segment| segment.stream == nacre_pool::WriteStream::Data).unwrap();
    let place = segment.place[0];
    device.rot((1 << 20) + u64::from(place.slot) * pool.store.slot() + 60_000, 3);
    ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)).unwrap();
    ask(&pool, PoolRequest::AwaitScrub).unwrap();
    let ill = status(&pool);
    assert_eq!((ill.scrub.phase, ill.scrub.errors, ill.damaged), (Phase::Finished, 1, 1));
    assert_eq!(ill.names, ["tank:/victim"]);
    assert_eq!(ill.figures.devices[0].counts.checksum_errors, 1);
    let PoolAnswer::Checked(found) = ask(&pool, PoolRequest::Check).unwrap() else { panic!() };
    assert_eq!(found.problems, 1);
    assert!(pool.watch.events(0).iter().any(|event| event.class == "ereport.fs.zfs.checksum"));
    // It is known after an import as well: how the last scrub ended is kept.
    pool.export().unwrap();
    let pool = open(&device, Access::ReadWrite, None).unwrap();
    let later = status(&pool);
    assert_eq!((later.scrub, later.damaged, later.names), (ill.scrub, 1, ill.names));
    // Scrubs of known damage, and of new data.
    let scrub = |extent| {
        ask(&pool, PoolRequest::Scrub(ScrubOrder::StartOf(extent))).unwrap();
        ask(&pool, PoolRequest::AwaitScrub).unwrap();
        status(&pool)
    };
    let known = scrub(Extent::Errors);
    assert_eq!((known.scrub.errors, known.damaged), (1, 1));
    device.rot((1 << 20) + u64::from(place.slot) * pool.store.slot() + 60_000, 3);
    assert_eq!((scrub(Extent::Errors).scrub.errors, status(&pool).damaged), (0, 0));
    let new = scrub(Extent::New);
    assert!(new.scrub.examined < 200_000, "{:?}", new.scrub);
    write(&pool, "later", 300_000);
    ask(&pool, PoolRequest::Sync).unwrap();
    let new = scrub(Extent::New);
    assert!(new.scrub.examined > 300_000, "{:?}", new.scrub);
    ask(&pool, PoolRequest::Clear { device: None }).unwrap();
    assert_eq!(status(&pool).damaged, 0);
}

/// A spare replaces a failed device, and is free again when the device is back.
#[test]
fn a_spare_stands_in_by_itself() {
    let sims: Vec<Arc<Simulator>> = (0..3).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 64 << 20))).collect();
    let device = |at: usize| Arc::clone(&sims[at]) as Arc<dyn Device>;
    let mirror = [nacre_pool::backend::NewGroup { kind: nacre_pool::label::GroupKind::Mirror, devices: 2 }];
    let pool = Imported::create(vec![device(0), device(1)], &mirror, "tank", &[], opening()).unwrap();
    pool.store.add_spare(device(2), 5).unwrap();
    pool.resilver.take_up(Vec::new());
    assert_eq!(status(&pool).figures.devices[2].role, "spare");
    write(&pool, "before", 200_000);
    ask(&pool, PoolRequest::Sync).unwrap();
    sims[0].fail_after(0);
    sims[0].fail_reads(true);
    write(&pool, "after", 200_000);
    ask(&pool, PoolRequest::Sync).unwrap();
    let until = |is_so: &dyn Fn(&Status) -> bool| {
        while !is_so(&status(&pool)) {
            crate::clock::pause(std::time::Duration::from_millis(5));
        }
    };
    until(&|status| status.figures.devices[2].beside == Some(0) && !status.figures.devices[2].resilvering);
    assert!(pool.watch.events(0).iter().any(|event| event.class == "sysevent.fs.zfs.vdev_spare"));
    sims[0].crash(4);
    ask(&pool, PoolRequest::Online { devices: vec![PathBuf::from("disk0")] }).unwrap();
    until(&|status| status.figures.devices[2].beside.is_none() && status.figures.health == "ONLINE");
    pool.export().unwrap();
    let pool = Imported::open(
        sims.iter().map(|sim| Arc::clone(sim) as Arc<dyn Device>).collect::<Vec<_>>(),
        Access::ReadWrite,
        None,
        opening(),
    );
    assert_eq!(status(&pool.unwrap()).figures.devices[2].role, "spare");
}

fn plain(sims: &[Arc<Simulator>]) -> Vec<Arc<dyn Device>> {
    sims.iter().map(|sim| Arc::clone(sim) as Arc<dyn Device>).collect()
}

fn finished(pool: &Imported) -> ScrubReport {
    while pool.resilver.job.wait(std::time::Duration::from_secs(1)) {}
    let report = pool.resilver.report();
    assert_eq!((report.phase, report.errors), (Phase::Finished, 0));
    report
}

/// A mirror that got a third device; the resilver has gone through a part when the power fails. Answers
/// the devices, and how far it was.
fn interrupted() -> (Vec<Arc<Simulator>>, ScrubReport) {
    let sims: Vec<Arc<Simulator>> = (0..3).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 96 << 20))).collect();
    let mirror = [nacre_pool::backend::NewGroup { kind: nacre_pool::label::GroupKind::Mirror, devices: 2 }];
    let pool = Imported::create(plain(&sims[..2]), &mirror, "tank", &[], opening()).unwrap();
    (0..24).for_each(|file| write(&pool, &format!("file{file}"), 1_000_000));
    ask(&pool, PoolRequest::Sync).unwrap();
    sims[2].slow_down(std::time::Duration::from_millis(20));
    pool.store.attach(0, Arc::clone(&sims[2]) as Arc<dyn Device>, 50).unwrap();
    pool.resilver.take_up(Vec::new());
    pool.resilver.begin().unwrap();
    while pool.resilver.report().phase == Phase::Running && pool.resilver.report().examined < 8 << 20 {
        crate::clock::pause(std::time::Duration::from_millis(1));
    }
    pool.resilver.job.leave();
    let report = pool.resilver.report();
    assert!(report.phase == Phase::Running && report.position > 0, "{report:?}");
    drop(pool);
    sims[2].slow_down(std::time::Duration::ZERO);
    sims.iter().zip(5..).for_each(|(sim, seed)| sim.crash(seed));
    (sims, report)
}

/// Everything is on this device alone.
fn has_everything(sim: &Arc<Simulator>) {
    let pool = Imported::open(plain(std::slice::from_ref(sim)), Access::ReadWrite, None, opening()).unwrap();
    assert_eq!(findings(&pool), Vec::<String>::new());
    pool.export().unwrap();
}

#[test]
fn a_resilver_goes_on_where_it_was() {
    let (sims, before) = interrupted();
    let written = sims[2].written();
    let pool = Imported::open(plain(&sims), Access::ReadWrite, None, opening()).unwrap();
    let after = finished(&pool);
    assert_eq!(after.started, before.started);
    assert!(after.examined >= before.examined && after.repaired >= before.repaired, "{after:?}, before {before:?}");
    let written = sims[2].written() - written;
    assert!(written < 20 << 20, "{written} bytes of 24 files of 1 MB were written after {before:?}");
    pool.export().unwrap();
    // The result is reported after the next import as well.
    let pool = Imported::open(plain(&sims), Access::ReadWrite, None, opening()).unwrap();
    assert_eq!(pool.resilver.report(), after);
    pool.export().unwrap();
    has_everything(&sims[2]);
}

/// A resilver starts again if the pool was used without its device meanwhile.
#[test]
fn a_resilver_begins_anew_where_others_have_written() {
    let (sims, before) = interrupted();
    let pool = Imported::open(plain(&sims[..2]), Access::ReadWrite, None, opening()).unwrap();
    write(&pool, "file0", 1_500_000);
    pool.export().unwrap();
    let written = sims[2].written();
    let pool = Imported::open(plain(&sims), Access::ReadWrite, None, opening()).unwrap();
    let after = finished(&pool);
    assert!(after.repaired < 24 << 20, "what was written before was right: {after:?}, before {before:?}");
    // All but the file that was written since.
    assert!(after.examined > 22 << 20, "{after:?}");
    assert!(sims[2].written() - written < 24 << 20);
    pool.export().unwrap();
    has_everything(&sims[2]);
}

fn until(pool: &Imported, is_so: &dyn Fn(&ReshapeReport) -> bool) -> ReshapeReport {
    loop {
        let report = pool.reshape.report();
        if is_so(&report) {
            return report;
        }
        crate::clock::pause(std::time::Duration::from_millis(5));
    }
}

/// An unreadable frame blocks a removal: the files are named, and it continues when they are removed.
#[test]
fn a_removal_goes_on_when_what_is_lost_is_removed() {
    let sims: Vec<Arc<Simulator>> = (0..3).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 96 << 20))).collect();
    let pool = Imported::create(plain(&sims), &[], "tank", &[], opening()).unwrap();
    (0..24).for_each(|file| write(&pool, &format!("file{file}"), 500_000));
    ask(&pool, PoolRequest::Sync).unwrap();
    sims[1].fail_reads(true);
    changing::remove(&pool, &[PathBuf::from("disk1")], false, &mut Silent).unwrap();
    let ended = |report: &ReshapeReport| report.phase == Phase::Finished;
    let held_up = |report: &ReshapeReport| report.held_up.as_ref().is_some_and(|why| why.contains("cannot be read"));
    let report = until(&pool, &|report| ended(report) || held_up(report));
    let ill = status(&pool);
    assert!(held_up(&report) && ill.damaged > 0 && !ill.names.is_empty(), "{report:?}, {:?}", ill.names);
    let dataset = pool.pool.dataset(pool.pool.root().unwrap()).unwrap();
    for name in &ill.names {
        let name = name.strip_prefix("tank:/").unwrap();
        dataset.files().unlink(&dataset.files().root(), name.as_bytes()).unwrap();
    }
    until(&pool, &ended);
    assert_eq!(findings(&pool), Vec::<String>::new());
    assert!(nacre_pool::label::probe(&*sims[1]).is_err(), "it cannot be read");
    pool.export().unwrap();
}

/// A conversion is turned into another while it is under way; other changes wait.
#[test]
fn a_conversion_is_turned_into_another() {
    let sims: Vec<Arc<Simulator>> = (0..2).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 96 << 20))).collect();
    let pool = Imported::create(plain(&sims), &[], "tank", &[], opening()).unwrap();
    (0..20).for_each(|file| write(&pool, &format!("file{file}"), 1_000_000));
    ask(&pool, PoolRequest::Sync).unwrap();
    pool.reshape.order("tank", ReshapeOrder::Rate(1)).unwrap();
    let group = PathBuf::from("disk0");
    let convert = |to: &str| changing::convert(&pool, &group, to, (&[], None, false), &mut Silent);
    convert("raidz1").unwrap();
    let stopped = pool.reshape.order("tank", ReshapeOrder::Stop).unwrap_err().to_string();
    assert!(stopped.contains("convert the group to what it was"), "{stopped}");
    assert!(changing::rebalance(&pool, &mut Silent).unwrap_err().to_string().contains("a conversion is under way"));
    assert!(convert("raidz1").unwrap_err().to_string().contains("it is that already"));
    convert("mirror").unwrap();
    assert_eq!(pool.reshape.report().phase, Phase::Running);
    pool.reshape.order("tank", ReshapeOrder::Rate(0)).unwrap();
    until(&pool, &|report| report.phase == Phase::Finished);
    assert_eq!(status(&pool).figures.devices.len(), 2);
    assert_eq!(findings(&pool), Vec::<String>::new());
    pool.export().unwrap();
    has_everything(&sims[1]);
}

/// Returns the problems that a check reports.
fn findings(pool: &Imported) -> Vec<String> {
    struct Lines(Vec<String>);
    impl crate::Progress for Lines {
        fn note(&mut self, line: &str) -> bool {
            self.0.push(line.to_owned());
            true
        }
    }
    let mut lines = Lines(Vec::new());
    let PoolAnswer::Checked(found) = run(pool, &NoMounts, PoolRequest::Check, &mut lines).unwrap() else { panic!() };
    assert_eq!(found.problems, lines.0.len() as u64, "{:?}", lines.0);
    lines.0
}

#[test]
fn what_cannot_say_whose_it_is_is_looked_for() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    write(&pool, "victim", 200_000);
    let root = pool.pool.root().unwrap();
    pool.pool.snapshot(&[(root, "before".to_owned())]).unwrap();
    let dataset = pool.pool.dataset(root).unwrap();
    dataset.files().unlink(&dataset.files().root(), b"victim").unwrap();
    write(&pool, "other", 100_000);
    ask(&pool, PoolRequest::Sync).unwrap();
    // A bit in the header of each frame with content.
    for segment in pool.store.segments().into_iter().filter(|segment| segment.stream == nacre_pool::WriteStream::Data) {
        let start = (1 << 20) + u64::from(segment.place[0].slot) * pool.store.slot();
        let mut headers = Vec::new();
        pool.store
            .inspect(segment.id, &mut |_, offset, _| {
                headers.push(start + u64::from(offset));
                true
            })
            .unwrap();
        headers.iter().for_each(|header| device.rot(header + 30, 5));
    }
    ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)).unwrap();
    ask(&pool, PoolRequest::AwaitScrub).unwrap();
    let ill = status(&pool);
    assert_eq!(ill.damaged, 3);
    assert_eq!(ill.names, ["tank@before:/victim", "tank:/other"]);
    assert_eq!(status(&pool).names, ill.names);
    // Another scrub finds no owner in them either.
    ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)).unwrap();
    ask(&pool, PoolRequest::AwaitScrub).unwrap();
    assert_eq!(status(&pool).names, ill.names);
}

#[test]
fn a_check_finds_what_is_lost_and_what_nobody_names() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    write(&pool, "file", 200_000);
    ask(&pool, PoolRequest::Sync).unwrap();
    assert_eq!(findings(&pool), Vec::<String>::new());
    let content = vec![1; 5000];
    let frame = NewFrame {
        stream: WriteStream::Data,
        kind: FrameKind::Data,
        birth: nacre_pool::Txg(1),
        owner: Owner { dataset: 1, object: 77, offset: 0 },
        compression: CompressionSetting::Off,
        checksum: nacre_pool::ChecksumKind::Xxh3,
        content: &content,
    };
    let pointer = pool.store.write(&frame).unwrap();
    let nameless = findings(&pool);
    assert_eq!(nameless, [format!("frame {}:{} takes room, and nothing names it", pointer.segment, pointer.index)]);
    // The same segment holds the file's records: the first of them is freed behind the back of its
    // tree.
    let txg = nacre_pool::Txg(pool.store.durable().0 + 1);
    pool.store.free_named(pointer.segment, 0, 131_072 + 80, txg);
    let lost = findings(&pool);
    assert!(
        lost.iter().any(|line| *line == format!("frame {}:0 is named by a tree, and free", pointer.segment)),
        "{lost:?}"
    );
}

/// Frames below a lost node of a tree are counted, not listed one by one.
#[test]
fn a_check_names_a_lost_node_and_counts_what_is_below_it() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    for number in 0..40 {
        write(&pool, &format!("file{number}"), 20_000);
    }
    pool.export().unwrap();
    let pool = open(&device, Access::ReadOnly, None).unwrap();
    let dataset = pool.pool.root().unwrap();
    let node = pool.pool.catalog_view().dataset(dataset).unwrap().root.unwrap();
    let place = pool.store.segments().into_iter().find(|segment| segment.id == node.segment).unwrap().place;
    let mut at = None;
    pool.store
        .inspect(node.segment, &mut |header, offset, _| {
            let own = (header.pointer.segment, header.pointer.index) == (node.segment, node.index);
            at = at.or(own.then_some(offset));
            true
        })
        .unwrap();
    // A bit of its content, in both copies.
    for copy in place.iter() {
        device.rot((1 << 20) + u64::from(copy.slot) * pool.store.slot() + u64::from(at.unwrap()) + 100, 5);
    }
    let found = findings(&pool);
    let what = "tank: a node of its tree cannot be read, nor what only that leads to: ";
    assert!(found.iter().any(|line| line.starts_with(what)), "{found:?}");
    let below: Vec<_> = found.iter().filter(|line| line.contains("take room, and nothing that can be read")).collect();
    assert!(below.len() == 1 && below[0].ends_with("(1)"), "{found:?}");
    assert!(!found.iter().any(|line| line.contains("takes room, and nothing names it")), "{found:?}");
}

#[test]
fn a_scrub_is_one_at_a_time() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    for order in [ScrubOrder::Stop, ScrubOrder::Pause] {
        assert!(ask(&pool, PoolRequest::Scrub(order)).unwrap_err().what.contains("there is no active scrub"));
    }
    // One that is slow enough to be met.
    for number in 0..40 {
        write(&pool, &format!("file{number}"), 100_000);
    }
    ask(&pool, PoolRequest::Sync).unwrap();
    device.slow_down(Duration::from_millis(20));
    ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)).unwrap();
    if let Err(refusal) = ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)) {
        assert_eq!(refusal.kind, Kind::Busy);
    }
    if ask(&pool, PoolRequest::Scrub(ScrubOrder::Pause)).is_ok() {
        assert_eq!(status(&pool).scrub.phase, Phase::Paused);
        // It waits over an export.
        device.slow_down(Duration::ZERO);
        pool.export().unwrap();
        let pool = open(&device, Access::ReadWrite, None).unwrap();
        assert_eq!(status(&pool).scrub.phase, Phase::Paused);
        ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)).unwrap();
        ask(&pool, PoolRequest::AwaitScrub).unwrap();
        assert_eq!((status(&pool).scrub.phase, status(&pool).scrub.errors), (Phase::Finished, 0));
    }
}

#[test]
fn properties_are_kept_and_checked() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    let set = |pool: &Imported, name: &str, value: &str| {
        ask(pool, PoolRequest::Set { name: name.to_owned(), value: value.to_owned() })
    };
    for (name, value, said) in [
        ("nonsense", "1", "cannot set property for 'tank': invalid property 'nonsense'"),
        ("size", "1", "is readonly"),
        ("altroot", "/x", "can only be set at creation or import time"),
        ("autotrim", "perhaps", "must be one of"),
        ("comment", "a text that is longer than thirty-two bytes", "comment"),
    ] {
        let refusal = set(&pool, name, value).unwrap_err();
        assert!(refusal.what.contains(said), "{name}: {refusal}");
        assert_eq!(refusal.next.contains("nacre-properties(7)"), name == "nonsense", "{refusal}");
    }
    set(&pool, "comment", "kept").unwrap();
    set(&pool, "autotrim", "on").unwrap();
    set(&pool, "my:own", "too").unwrap();
    remember(&pool, 0, "zpool set comment=kept tank");
    pool.export().unwrap();
    let pool = open(&device, Access::ReadWrite, Some("other")).unwrap();
    let PoolAnswer::Listed(figures) = ask(&pool, PoolRequest::List).unwrap() else { panic!() };
    for (name, value, source) in [
        ("name", "other", "-"),
        ("comment", "kept", "local"),
        ("autotrim", "on", "local"),
        ("my:own", "too", "local"),
        ("health", "ONLINE", "-"),
    ] {
        let found = properties::value(&figures, name).unwrap();
        assert_eq!((found.exact.as_str(), found.source), (value, source), "{name}");
    }
    assert!(properties::names(&figures).iter().all(|name| properties::value(&figures, name).is_ok()));
    set(&pool, "my:own", "").unwrap();
    let PoolAnswer::Listed(figures) = ask(&pool, PoolRequest::List).unwrap() else { panic!() };
    assert!(!properties::names(&figures).contains(&"my:own".to_owned()));
    let PoolAnswer::History(lines) = ask(&pool, PoolRequest::History).unwrap() else { panic!() };
    assert_eq!(
        lines.iter().map(|line| (line.text.as_str(), line.host.as_str())).collect::<Vec<_>>(),
        [("zpool set comment=kept tank", "here")]
    );
}

#[test]
fn read_only_means_nothing_is_written() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    write(&pool, "file", 100_000);
    pool.export().unwrap();
    let before = device.bytes();
    let pool = open(&device, Access::ReadOnly, None).unwrap();
    for request in
        [PoolRequest::Set { name: "comment".to_owned(), value: "x".to_owned() }, PoolRequest::Destroy { force: true }]
    {
        assert!(ask(&pool, request).unwrap_err().what.contains("pool is read only"));
    }
    let PoolAnswer::Checked(found) = ask(&pool, PoolRequest::Check).unwrap() else { panic!() };
    assert_eq!((found.problems, found.inodes), (0, 2));
    ask(&pool, PoolRequest::Scrub(ScrubOrder::Start)).unwrap();
    ask(&pool, PoolRequest::AwaitScrub).unwrap();
    ask(&pool, PoolRequest::Export { force: false }).unwrap();
    assert!(device.bytes() == before);
    assert!(open(&device, Access::ReadOnly, Some("other")).unwrap_err().what.contains("cannot have another name"));
}

#[test]
fn what_a_comparison_left_goes_with_the_next_import() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    let root = pool.pool.root().unwrap();
    let mark = [("nacre:diff".to_owned(), "on".to_owned())];
    pool.pool.snapshot_with(&[(root, "nacre-diff-7".to_owned())], &mark).unwrap();
    pool.pool.snapshot(&[(root, "nacre-diff-mine".to_owned())]).unwrap();
    pool.export().unwrap();
    let pool = open(&device, Access::ReadWrite, None).unwrap();
    let left: Vec<String> = pool.pool.snapshots(root).unwrap().into_iter().map(|(_, row, _)| row.name).collect();
    assert_eq!(left, ["nacre-diff-mine"]);
}

#[test]
fn a_pool_whose_device_fails_is_let_go_by_force() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let pool = create(&device);
    write(&pool, "kept", 50_000);
    ask(&pool, PoolRequest::Sync).unwrap();
    write(&pool, "lost", 50_000);
    device.fail_after(0);
    assert!(ask(&pool, PoolRequest::Sync).is_err());
    let ill = status(&pool);
    assert_eq!(ill.figures.health, "SUSPENDED");
    assert!(ill.figures.devices[0].counts.write_errors > 0);
    assert!(ask(&pool, PoolRequest::Export { force: false }).unwrap_err().next.contains("-f"));
    ask(&pool, PoolRequest::Export { force: true }).unwrap();
}

#[test]
fn a_pool_that_was_never_finished_is_told_apart() {
    let device = Arc::new(Simulator::new("disk", 64 << 20));
    let new = nacre_pool::store::NewPool {
        name: "tank".to_owned(),
        guid: 7,
        host: (1, "here".to_owned()),
        time: 1,
        redundant_metadata: false,
    };
    drop(nacre_pool::Store::create(devices(&device), &new).unwrap());
    let refusal = open(&device, Access::ReadWrite, None).unwrap_err();
    assert!(refusal.what.contains("was never finished") && refusal.next.contains("create it again"), "{refusal}");
}
