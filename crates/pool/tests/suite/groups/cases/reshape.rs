//! Pools that change their shape: devices and groups that leave, groups that become wider, narrower or
//! others, among everything else that can happen to them.

use super::cuts;
use crate::groups::*;

use nacre_pool::backend::NewShape;
use nacre_pool::label::ChangeKind;

/// Moves what is to be moved, and ends the change that is under way, if anything can be done now.
fn go_on(store: &Store, budget: u64, commit: &mut dyn FnMut() -> Result<(), PoolError>) -> Result<bool, PoolError> {
    let mut stuck = BTreeSet::new();
    let moved = store.reshape_step(budget, &mut stuck)?;
    if !moved.idle {
        return Ok(false);
    }
    for _ in 0..2 {
        commit()?;
    }
    store.end_change()
}

fn to_the_end(store: &Store, mut txg: u64) -> Result<(), PoolError> {
    let mut commit = || {
        txg += 1;
        let log_start = LogStart::default();
        store.commit(&Commit { txg: Txg(txg), catalog: None, upper: &[], log_start, time: 1 })
    };
    for _ in 0..40 {
        if go_on(store, u64::MAX, &mut commit)? {
            return Ok(());
        }
    }
    panic!("a change does not end: {:?}", store.left_to_move());
}

impl Model {
    pub fn go_on(&mut self, budget: u64) -> Result<bool, PoolError> {
        let store = self.store.take().unwrap();
        let ended = go_on(&store, budget, &mut || {
            self.states.insert(self.txg, self.now.clone());
            self.places.insert(self.txg, self.place);
            self.txg += 1;
            let (txg, log_start) = (Txg(self.txg - 1), LogStart::default());
            store.commit(&Commit { txg, catalog: None, upper: &[], log_start, time: self.txg })?;
            self.durable = txg.0;
            Ok(())
        });
        self.store = Some(store);
        ended
    }

    /// The change that is under way comes to its end.
    pub fn end_change(&mut self) {
        for _ in 0..40 {
            if self.go_on(1 << 40).unwrap() {
                return;
            }
        }
        let left = self.store().segments().into_iter().filter(|segment| {
            let at = SegmentAt { segment: segment.id, place: &segment.place };
            segment.live_frames > 0 && self.disks().is_misplaced(at, segment.stream)
        });
        let left: Vec<_> = left.collect();
        panic!("a change does not end: {:?}, {left:?}; {:?}", self.store().shape_change(), self.health());
    }

    fn write_some(&mut self, frames: usize) {
        for _ in 0..frames {
            self.write().unwrap();
        }
        self.commit().unwrap();
    }

    fn reads_all(&self) {
        for (number, pointer) in &self.now {
            assert!(*self.store().read(pointer).unwrap() == *content(*number), "frame {number}");
        }
    }
}

fn without(model: &Model, leaving: &[u16]) -> Result<(), PoolError> {
    let shape = model.disks().without(leaving)?;
    model.store().begin_change(&shape, &[], &[])
}

/// Whatever leaves, everything is on the others, and the device is nobody's.
#[test]
fn what_leaves_has_nothing_in_the_end() {
    for (groups, leaving) in [
        (vec![(GroupKind::Plain, 3)], vec![0]),
        (vec![(GroupKind::Mirror, 2), (GroupKind::Mirror, 2)], vec![0, 1]),
        (vec![(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 4)], vec![2, 3, 4, 5]),
        (vec![(GroupKind::RaidZ(1), 4), (GroupKind::Mirror, 2)], vec![0, 1, 2, 3]),
        (vec![(GroupKind::RaidZ(2), 6)], vec![1]),
    ] {
        println!("{groups:?} without {leaving:?}");
        let mut model = Model::new(&groups, &[64], 31);
        model.write_some(90);
        let (before, size) = (model.store().space(), model.disks().identity().members.len());
        without(&model, &leaving).unwrap();
        let refused = without(&model, &leaving).unwrap_err().to_string();
        assert!(refused.contains("a removal is under way"), "{refused}");
        let now = model.store().space();
        assert!(now.size < before.size, "what leaves has no room: {now:?}, {before:?}");
        model.write_some(10);
        let left = model.store().left_to_move().bytes;
        assert!(left > 0);
        let moved = model.store().traffic().relocated;
        model.end_change();
        let moved = model.store().traffic().relocated - moved;
        assert!(moved <= left + left / 5 + MIB / 2, "{moved} bytes were moved of {left}");
        let after = model.store().space();
        assert_eq!(after.size, model.disks().room_after(&nothing(), &[]).size);
        assert!(after.allocated >= before.allocated - before.table, "{after:?}, {before:?}");
        assert_eq!(model.disks().identity().members.len(), size);
        for number in &leaving {
            assert_eq!(model.health()[usize::from(*number)].status, MemberStatus::Removed);
            let left = model.sim(usize::from(*number));
            assert!(nacre_pool::label::probe(&**left).unwrap().is_none(), "it belongs to no pool");
            left.fail_after(0);
            left.fail_reads(true);
        }
        model.reads_all();
        model.scrub().unwrap();
        model.again();
        model.write_some(10);
        model.survives_losses();
    }
}

fn nothing() -> NewShape {
    NewShape {
        kind: ChangeKind::Removal,
        group: usize::from(u8::MAX),
        becomes: GroupKind::Plain,
        leaving: vec![],
        coming: 0,
    }
}

/// What cannot leave is refused, and nothing has changed.
#[test]
fn what_cannot_leave_stays() {
    let mut model = Model::new(&[(GroupKind::Mirror, 2), (GroupKind::Mirror, 2)], &[64], 33);
    for (leaving, why) in [(vec![0], "only whole mirrors"), (vec![0, 1, 2, 3], "several groups")] {
        let refused = without(&model, &leaving).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
    model.fill(MIB);
    let refused = without(&model, &[0, 1]).unwrap_err().to_string();
    assert!(refused.contains("out of space"), "{refused}");
    assert!(model.store().shape_change().is_none());
    let one = Model::new(&[(GroupKind::RaidZ(1), 2)], &[64], 33);
    let refused = without(&one, &[0]).unwrap_err().to_string();
    assert!(refused.contains("needs 2 devices"), "{refused}");
    let refused = without(&one, &[0, 1]).unwrap_err().to_string();
    assert!(refused.contains("nothing would be left"), "{refused}");
}

/// A removal that is stopped leaves the pool as large as before, also where the intent log was to leave.
#[test]
fn a_removal_is_stopped() {
    let two = (GroupKind::Plain, 2);
    for (groups, leaving) in [
        (vec![two], vec![1]),
        (vec![two], vec![0]),
        (vec![(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 3)], vec![0, 1]),
    ] {
        let mut model = Model::new(&groups, &[64], 35);
        model.write_some(150);
        let (size, copies) = (model.store().space().size, model.disks().log_copies());
        without(&model, &leaving).unwrap();
        assert!(!model.go_on(MIB / 4).unwrap(), "{groups:?}");
        model.again();
        let change = model.store().shape_change().unwrap();
        assert_eq!(change.leaving, leaving, "an import knows of it");
        model.store().give_up_change().unwrap();
        assert!(model.store().give_up_change().is_err());
        for _ in 0..2 {
            assert_eq!((model.store().space().size, model.disks().log_copies()), (size, copies));
            model.again();
        }
        assert!(model.store().shape_change().is_none());
        model.write_some(60);
        model.reads_all();
        model.survives_losses();
    }
}

/// Rows become wider: in the end as much room is free as in a pool that was made so.
#[test]
fn rows_become_wider_and_narrower() {
    let mut model = Model::new(&[(GroupKind::RaidZ(1), 4)], &[72], 37);
    model.write_some(200);
    let (old, data) = (model.store().space(), model.store().space().allocated);
    let wider = NewShape {
        kind: ChangeKind::Expansion,
        group: 0,
        becomes: GroupKind::RaidZ(1),
        leaving: Vec::new(),
        coming: 1,
    };
    let (new, guid) = model.fresh();
    model.store().begin_change(&wider, &[new], &[guid]).unwrap();
    let at_once = model.store().space();
    assert!(at_once.size > old.size && at_once.copies > old.copies, "{at_once:?}, {old:?}");
    let moved = model.store().traffic().relocated;
    let mut free = at_once.free;
    while !model.go_on(4 * MIB).unwrap() {
        let now = model.store().space();
        assert!(now.free + MIB >= free, "{now:?}");
        free = now.free;
    }
    let moved = model.store().traffic().relocated - moved;
    assert!(moved <= data + data / 10, "{moved} bytes were moved of {data}");
    let wide = model.store().space();
    let mut fresh = Model::new(&[(GroupKind::RaidZ(1), 5)], &[72], 37);
    fresh.write_some(200);
    // By the figures, and by what can be written.
    let used = |model: &Model| model.store().space().size - model.store().space().free;
    assert!(used(&model) <= used(&fresh) + used(&fresh) / 50, "{wide:?}, {:?}", fresh.store().space());
    let (more, most) = (model.fill(0), fresh.fill(0));
    assert!(more >= most - most / 50, "{more} bytes fit in, {most} into a pool that was always so wide");
    drop(fresh);
    let mut rest = model.now.len() - 200;
    while rest > 0 {
        model.free(rest.min(64));
        model.commit().unwrap();
        rest = model.now.len().saturating_sub(200);
    }
    model.scrub().unwrap();
    model.survives_losses();
    model.again();
    without(&model, &[1]).unwrap();
    model.end_change();
    model.reads_all();
    let narrow = model.store().space();
    assert!(narrow.size <= old.size && narrow.size + 8 * MIB > old.size, "{narrow:?}, {old:?}");
    model.scrub().unwrap();
    model.again();
    model.survives_losses();
}

/// Groups become others: nothing is lost with as many devices as both allow.
#[test]
fn groups_become_others() {
    for (from, becomes, coming) in [
        ((GroupKind::Mirror, 2), GroupKind::RaidZ(1), 1),
        ((GroupKind::Mirror, 3), GroupKind::RaidZ(2), 1),
        ((GroupKind::RaidZ(1), 4), GroupKind::RaidZ(2), 1),
        ((GroupKind::RaidZ(2), 5), GroupKind::RaidZ(3), 0),
        ((GroupKind::RaidZ(2), 5), GroupKind::RaidZ(1), 0),
        ((GroupKind::RaidZ(1), 3), GroupKind::Mirror, 0),
        ((GroupKind::Plain, 1), GroupKind::RaidZ(1), 2),
        ((GroupKind::Plain, 3), GroupKind::RaidZ(2), 1),
        ((GroupKind::Plain, 2), GroupKind::Mirror, 0),
    ] {
        println!("{from:?} becomes {becomes:?}");
        let mut model = Model::new(&[from], &[96], 39);
        model.write_some(30);
        let shape = NewShape { kind: ChangeKind::Conversion, group: 0, becomes, leaving: Vec::new(), coming };
        let (devices, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..coming).map(|_| model.fresh()).unzip();
        model.store().begin_change(&shape, &devices, &guids).unwrap();
        model.write_some(10);
        let (_, meanwhile, after) = model.disks().redundancy(&shape);
        assert_eq!(model.parity(0), meanwhile);
        model.survives_losses();
        model.go_on(2 * MIB).unwrap();
        model.survives_losses();
        model.again();
        model.end_change();
        assert_eq!((model.parity(0), model.disks().log_copies()), (after, after + 1));
        model.reads_all();
        model.scrub().unwrap();
        model.commit().unwrap();
        model.survives_losses();
        model.again();
    }
}

/// A second copy of metadata lies on a device that has become one of another group since: what either group
/// may lose then is not both copies.
#[test]
fn copies_in_two_groups_are_no_redundancy_of_either() {
    let mut model = Model::new(&[(GroupKind::Plain, 3)], &[64], 45);
    model.write_some(60);
    let (new, guid) = model.fresh();
    model.store().attach(2, new, guid).unwrap();
    model.resilver().unwrap();
    let becomes = conversion(GroupKind::Mirror, ChangeKind::Conversion, 0);
    model.store().begin_change(&becomes, &[], &[]).unwrap();
    model.end_change();
    model.commit().unwrap();
    assert_eq!([0, 1].map(|group| model.parity(group)), [1, 1]);
    for _ in 0..12 {
        model.survives_losses();
    }
}

/// A conversion is turned round half way: the group is what it was, and wider by the devices that came.
#[test]
fn a_conversion_is_turned_round() {
    for (from, becomes, coming) in
        [((GroupKind::Mirror, 2), GroupKind::RaidZ(1), 1), ((GroupKind::RaidZ(2), 5), GroupKind::RaidZ(1), 0)]
    {
        println!("{from:?} becomes {becomes:?}, and is again what it was");
        let mut model = Model::new(&[from], &[96], 47);
        model.write_some(80);
        let (devices, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..coming).map(|_| model.fresh()).unzip();
        let shape = conversion(becomes, ChangeKind::Conversion, coming);
        model.store().begin_change(&shape, &devices, &guids).unwrap();
        model.go_on(2 * MIB).unwrap();
        model.write_some(20);
        let stopped = model.store().give_up_change().unwrap_err().to_string();
        assert!(stopped.contains("convert the group to what it was"), "{stopped}");
        let back = conversion(from.0, ChangeKind::Conversion, 0);
        let meanwhile = model.parity(0);
        model.store().begin_change(&back, &[], &[]).unwrap();
        assert_eq!(model.parity(0), meanwhile, "what lies in both shapes survives as much as before");
        model.go_on(MIB).unwrap();
        model.survives_losses();
        model.again();
        model.end_change();
        assert_eq!(model.disks().kind_of(0), from.0);
        model.reads_all();
        model.scrub().unwrap();
        model.commit().unwrap();
        model.survives_losses();
    }
}

/// What metadata had for itself leaves: it lies on the others from then on.
#[test]
fn devices_for_metadata_leave() {
    for data in [(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 4), (GroupKind::Plain, 1)] {
        let mut model = Model::new(&[data], &[64], 49);
        let (new, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..2).map(|_| model.fresh()).unzip();
        model.store().add_special(&new, &guids, &new_groups(&[(GroupKind::Mirror, 2)])).unwrap();
        model.write_some(80);
        let before = model.store().space();
        assert!(before.special > MIB, "{before:?}");
        let leaving = [data.1 as u16, data.1 as u16 + 1];
        let refused = model.store().begin_change(
            &NewShape { group: 1, ..conversion(GroupKind::RaidZ(1), ChangeKind::Conversion, 0) },
            &[],
            &[],
        );
        assert!(refused.unwrap_err().to_string().contains("remove them, and add others"));
        let outlook = model.store().outlook(&model.disks().without(&leaving).unwrap(), &[]).unwrap();
        without(&model, &leaving).unwrap();
        model.write_some(5);
        model.again();
        model.end_change();
        let after = model.store().space();
        assert_eq!((after.special, after.size), (0, before.size));
        assert!(after.available + 4 * MIB >= outlook.available.1, "{after:?}, {outlook:?}");
        model.reads_all();
        model.scrub().unwrap();
        model.again();
        model.survives_losses();
    }
}

impl Model {
    /// A device is gone, and the pool has noticed that.
    fn loses(&mut self, number: usize) {
        let device = Arc::clone(self.device(number));
        device.fail_after(0);
        device.fail_reads(true);
        self.away.insert(device.name().to_owned());
        for _ in 0..4 {
            self.write_some(4);
        }
        assert_eq!(self.health()[number].status, MemberStatus::Faulted);
    }
}

/// A device fails while it leaves, or in a group that is becoming another: the others have what it had. It
/// can be replaced all the same.
#[test]
fn what_fails_in_a_change_is_done_without_or_replaced() {
    let shapes = [
        (NewShape { leaving: vec![1], ..conversion(GroupKind::RaidZ(1), ChangeKind::Removal, 0) }, 0),
        (conversion(GroupKind::RaidZ(2), ChangeKind::Conversion, 1), 1),
        (conversion(GroupKind::RaidZ(1), ChangeKind::Expansion, 1), 1),
    ];
    // Nobody comes for it, another one comes, or comes too late.
    for (shape, replaced, whole) in
        shapes.iter().flat_map(|(shape, _)| [(shape, false, false), (shape, true, true), (shape, true, false)])
    {
        println!("{shape:?}, replaced: {replaced}, made whole: {whole}");
        let mut model = Model::new(&[(GroupKind::RaidZ(1), 4)], &[64], 51);
        model.write_some(80);
        let (devices, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..shape.coming).map(|_| model.fresh()).unzip();
        model.store().begin_change(shape, &devices, &guids).unwrap();
        model.go_on(MIB).unwrap();
        model.loses(1);
        if replaced {
            model.replace(1).unwrap();
        }
        if whole {
            model.resilver().unwrap();
            assert_eq!(model.lacking(0, &[]), 0);
            model.survives_losses();
        }
        if !whole && shape.kind == ChangeKind::Conversion {
            // There is not as much redundancy as it is to have before all devices are there.
            model.reads_all();
            model.replace(1).unwrap();
            model.resilver().unwrap();
        }
        model.end_change();
        model.reads_all();
        model.again();
        while !model.away.is_empty() {
            model.bring_one().unwrap();
        }
        model.resilver().unwrap();
        assert_eq!(model.lacking(0, &[]), 0);
        assert_eq!(model.health()[1].status == MemberStatus::Removed, shape.kind == ChangeKind::Removal);
        model.scrub().unwrap();
        model.commit().unwrap();
        model.survives_losses();
    }
}

/// A device that is for itself cannot be read any more while it leaves: everything else leaves it, and
/// when what is lost was removed the change comes to its end.
#[test]
fn what_is_lost_on_what_leaves_does_not_stay_for_ever() {
    let mut model = Model::new(&[(GroupKind::Plain, 3)], &[64], 53);
    model.write_some(120);
    without(&model, &[1]).unwrap();
    model.go_on(MIB).unwrap();
    model.sim(1).fail_reads(true);
    for _ in 0..4 {
        assert!(!model.go_on(u64::MAX).unwrap());
    }
    let left = model.store().left_to_move();
    let lost: Vec<u64> =
        model.now.iter().filter(|(_, pointer)| model.store().read(pointer).is_err()).map(|(at, _)| *at).collect();
    assert!(!lost.is_empty() && lost.len() < 100 && left.segments > 0, "{} frames, {left:?}", lost.len());
    for number in lost {
        let pointer = model.now.remove(&number).unwrap();
        model.store().free(&pointer, Txg(model.txg));
    }
    model.commit().unwrap();
    model.end_change();
    model.reads_all();
    model.scrub().unwrap();
    model.again();
}

/// After devices were added, what there is is spread over all of them.
#[test]
fn devices_are_evened_out() {
    let mut model = Model::new(&[(GroupKind::Mirror, 2)], &[128], 41);
    model.write_some(350);
    let (new, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..2).map(|_| model.fresh()).unzip();
    model.store().add_groups(&new, &guids, &new_groups(&[(GroupKind::Mirror, 2)])).unwrap();
    let (uneven, before) = (model.store().uneven(), model.store().traffic().relocated);
    assert!(uneven > 4 * MIB, "{uneven}");
    let mut stuck = BTreeSet::new();
    for _ in 0..60 {
        if model.store().even_step(4 * MIB, &mut stuck).unwrap().idle {
            break;
        }
        model.commit().unwrap();
        model.store().commit_moved().unwrap();
    }
    for _ in 0..4 {
        model.commit().unwrap();
    }
    let (most, least) = model.store().evenness().unwrap();
    assert!(most.taken <= least.taken + 60, "{most:?}, {least:?}");
    let moved = model.store().traffic().relocated - before;
    assert!(moved <= uneven + uneven / 2, "{moved} bytes were moved, {uneven} were too much");
    model.reads_all();
    model.again();
}

fn begin(store: &Store, shape: &NewShape, new: &[Arc<dyn Device>]) -> Result<(), PoolError> {
    let guids: Vec<u64> = (50..).take(new.len()).collect();
    store.begin_change(shape, new, &guids)?;
    to_the_end(store, 1000)
}

fn conversion(becomes: GroupKind, kind: ChangeKind, coming: usize) -> NewShape {
    NewShape { kind, group: 0, becomes, leaving: Vec::new(), coming }
}

/// Wherever the power fails in a change of shape, everything is there afterwards, and it goes on to its
/// end.
#[test]
fn a_crash_in_a_change_of_shape_loses_nothing() {
    let cases: Vec<Case> = vec![
        ("one of two leaves", vec![(GroupKind::Plain, 2)], 0, |store, _| {
            let shape = store.on_devices().unwrap().without(&[0])?;
            begin(store, &shape, &[])
        }),
        ("a mirror leaves", vec![(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 3)], 0, |store, _| {
            let shape = store.on_devices().unwrap().without(&[0, 1])?;
            begin(store, &shape, &[])
        }),
        ("rows become narrower", vec![(GroupKind::RaidZ(1), 4)], 0, |store, _| {
            let shape = store.on_devices().unwrap().without(&[2])?;
            begin(store, &shape, &[])
        }),
        ("rows become wider", vec![(GroupKind::RaidZ(1), 3)], 1, |store, new| {
            begin(store, &conversion(GroupKind::RaidZ(1), ChangeKind::Expansion, 1), &new)
        }),
        ("a mirror becomes rows", vec![(GroupKind::Mirror, 2)], 1, |store, new| {
            begin(store, &conversion(GroupKind::RaidZ(1), ChangeKind::Conversion, 1), &new)
        }),
        ("single devices become rows", vec![(GroupKind::Plain, 2)], 1, |store, new| {
            begin(store, &conversion(GroupKind::RaidZ(1), ChangeKind::Conversion, 1), &new)
        }),
        ("a conversion is turned round", vec![(GroupKind::Mirror, 2)], 1, |store, new| {
            store.begin_change(&conversion(GroupKind::RaidZ(1), ChangeKind::Conversion, 1), &new, &[50])?;
            store.reshape_step(MIB / 4, &mut BTreeSet::new())?;
            begin(store, &conversion(GroupKind::Mirror, ChangeKind::Conversion, 0), &[])
        }),
        ("rows get more parity", vec![(GroupKind::RaidZ(1), 3)], 1, |store, new| {
            begin(store, &conversion(GroupKind::RaidZ(2), ChangeKind::Conversion, 1), &new)
        }),
    ];
    let given: Option<u64> = std::env::var("NACRE_GROUP_CUTS").ok().and_then(|every| every.parse().ok());
    // The first writes are those of labels.
    let (closely, every) = given.map_or((5, 331), |every| (1, every));
    println!("campaign: power fails at each {every}th write of a change of shape (NACRE_GROUP_CUTS)");
    for (what, groups, more, change) in cases {
        let mut model = Model::new(&groups, &[64], 43);
        model.write_some(15);
        let next = |cut| cut + if cut < 14 { closely } else { every };
        cuts::cut(what, model, more, 0, change, next, |store| {
            resilver(store, 2000)?;
            to_the_end(store, 3000)
        });
    }
}

/// Wide rows that were a mirror become one again: its last devices have held root records before, older ones
/// than the others, and hold the newest before any label says that they hold some.
#[test]
fn devices_that_held_roots_before_are_no_older_than_others() {
    let mut model = Model::new(&[(GroupKind::Mirror, 10)], &[64], 57);
    model.write_some(2);
    let convert =
        |store: &Store, becomes| store.begin_change(&conversion(becomes, ChangeKind::Conversion, 0), &[], &[]);
    convert(model.store(), GroupKind::RaidZ(1)).unwrap();
    model.end_change();
    for _ in 0..4 {
        model.write_some(1);
    }
    drop(model.store.take());
    let (mut cut, mut begun) = (1, false);
    while !begun {
        let fuse = Fuse::default();
        let sims: Vec<Arc<Simulator>> = model.devices.values().map(|device| Arc::new(device.copy())).collect();
        let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".into()), time: 1 };
        let (store, _) = Store::open(sims.iter().map(|device| fuse.on(device)).collect(), &import).unwrap();
        fuse.set(cut);
        CRASHES.fetch_add(1, Ordering::Relaxed);
        begun = convert(&store, GroupKind::Mirror).is_ok();
        drop(store);
        sims.iter().enumerate().for_each(|(at, device)| device.crash(cut * 31 + at as u64));
        let store = open(&sims.iter().collect::<Vec<_>>(), Access::ReadOnly).unwrap();
        assert!(store.on_devices().unwrap().stale().is_empty(), "cut at {cut}");
        cut += 7;
    }
}
