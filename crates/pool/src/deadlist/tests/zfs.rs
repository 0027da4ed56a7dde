//! The figures of zfs-fuse 0.7.0 (pool version 23, one file of 1 GiB, compression off), step by
//! step, against these rules. Differences below half a MiB and 1/256 (3 MiB where the whole pool is
//! involved) are metadata, which this table omits.

use super::simulation::Pool;
use super::*;
use crate::error::LimitRefusal;
use crate::space::{Purpose, Shortage, judged, slop};

const MIB: u64 = 1 << 20;
const ROUNDING: u64 = MIB / 2;

/// Bytes that all datasets together may use: `used` + `available` of the root dataset in ZFS.
const USABLE: u64 = 1_031_798_784;

/// Figures of a dataset in ZFS: used, available, referenced, by dataset, by snapshots, by children,
/// by refreservation.
type Row = [u64; 7];

struct Bench {
    pool: Pool,
    files: BTreeMap<(u64, &'static str), Vec<u32>>,
}

impl Bench {
    fn new() -> Self {
        let size = USABLE + 128 * MIB;
        assert_eq!(slop(size), 128 * MIB);
        Self { pool: Pool::new(size), files: BTreeMap::new() }
    }

    /// Writes a part of a file in records of 128 KiB, like `dd` in ZFS.
    fn write(&mut self, id: u64, file: &'static str, mib: u64, offset: u64) {
        let records = (mib * 8) as usize;
        let first = (offset * 8) as usize;
        let mut blocks = self.files.remove(&(id, file)).unwrap_or_default();
        for record in first..first + records {
            let block = self.pool.write(id, MIB / 8);
            match blocks.get_mut(record) {
                Some(old) => {
                    let old = std::mem::replace(old, block);
                    self.pool.kill(id, &[old]);
                }
                None => blocks.push(block),
            }
        }
        self.files.insert((id, file), blocks);
        self.pool.txg.0 += 1;
    }

    fn remove(&mut self, id: u64, file: &'static str) {
        let blocks = self.files.remove(&(id, file)).unwrap();
        self.pool.kill(id, &blocks);
        self.pool.txg.0 += 1;
    }

    fn check(&mut self, when: &str, id: u64, zfs: Row) {
        self.pool.compare_breakdowns();
        let breakdown = self.pool.breakdown(id);
        let ours = [
            breakdown.used,
            self.pool.quotas.available_to_head(id).unwrap(),
            self.pool.quotas.usage(id).unwrap().referenced,
            breakdown.by_dataset,
            breakdown.by_snapshots,
            breakdown.by_children,
            breakdown.by_refreservation,
        ];
        for (figure, (ours, zfs)) in ours.iter().zip(zfs).enumerate() {
            let rounding = if id == 1 || figure == 1 { 6 * ROUNDING } else { ROUNDING + zfs / 256 };
            assert!(ours.abs_diff(zfs) < rounding, "{when}: figure {figure} of {id}: ours {ours}, zfs {zfs}");
        }
    }

    fn check_snapshot(&mut self, when: &str, snapshot: u32, used: u64, referenced: u64) {
        let ours = self.pool.used_by(snapshot);
        assert!(ours.abs_diff(used) < ROUNDING, "{when}: used: ours {ours}, zfs {used}");
        let ours = self.pool.snapshots[&snapshot].point.referenced;
        assert!(ours.abs_diff(referenced) < ROUNDING, "{when}: referenced: ours {ours}, zfs {referenced}");
    }
}

impl Pool {
    /// The four parts are the whole, everywhere.
    fn compare_breakdowns(&self) {
        for id in self.datasets.keys() {
            let parts = self.breakdown(*id);
            assert_eq!(parts.used, parts.by_dataset + parts.by_snapshots + parts.by_children + parts.by_refreservation);
        }
    }
}

#[test]
fn snapshots_clones_and_reservations() {
    let mut bench = Bench::new();
    let root = 1;
    let a = bench.pool.create(root);
    bench.write(a, "f1", 20, 0);
    bench.check("20 MiB written", a, [21_118_976, 1_010_200_576, 21_118_976, 21_118_976, 0, 0, 0]);
    let a1 = bench.pool.snapshot(a).unwrap();
    bench.check("a@1", root, [21_598_208, 1_010_200_576, 122_880, 122_880, 0, 21_475_328, 0]);
    bench.check_snapshot("a@1", a1, 0, 21_118_976);
    bench.write(a, "f1", 8, 0);
    bench.check("8 MiB overwritten", a, [29_614_080, 1_001_656_320, 21_118_976, 21_118_976, 8_495_104, 0, 0]);
    bench.check_snapshot("8 MiB overwritten", a1, 8_495_104, 21_118_976);
    let a2 = bench.pool.snapshot(a).unwrap();
    bench.write(a, "f2", 10, 0);
    bench.remove(a, "f1");
    bench.check("f1 deleted", a, [40_198_144, 991_010_816, 10_608_640, 10_608_640, 29_589_504, 0, 0]);
    bench.check_snapshot("f1 deleted", a1, 8_495_104, 21_118_976);
    bench.check_snapshot("f1 deleted", a2, 8_495_104, 21_118_976);

    bench.pool.quotas.set_quota(a, Some(100 * MIB)).unwrap();
    bench.pool.quotas.set_reservation(root, 200 * MIB).unwrap();
    bench.pool.quotas.set_reservation(a, 70 * MIB).unwrap();
    bench.check("reservation", root, [73_990_144, 957_808_640, 122_880, 122_880, 0, 73_867_264, 0]);
    bench.check("reservation", a, [40_198_144, 64_659_456, 10_608_640, 10_608_640, 29_589_504, 0, 0]);
    bench.pool.quotas.set_refreservation(a, 25 * MIB).unwrap();
    bench.check("refreservation", a, [55_828_480, 64_659_456, 10_608_640, 10_608_640, 29_589_504, 0, 15_630_336]);
    assert_eq!(judged(bench.pool.quotas.set_quota(a, Some(50 * MIB))), Err(LimitRefusal::BelowUse));
    bench.pool.quotas.set_quota(a, Some(75 * MIB)).unwrap();
    bench.check("quota", a, [55_828_480, 38_445_056, 10_608_640, 10_608_640, 29_589_504, 0, 15_630_336]);
    let a3 = bench.pool.snapshot(a).unwrap();
    bench.check("a@3", a, [66_412_544, 38_445_056, 10_608_640, 10_608_640, 29_589_504, 0, 26_214_400]);
    assert_eq!(judged(bench.pool.quotas.set_refreservation(a, 70 * MIB)), Err(LimitRefusal::BeyondAvailable));
    bench.pool.quotas.set_quota(a, None).unwrap();
    assert_eq!(judged(bench.pool.quotas.set_quota(a, Some(10 * MIB))), Err(LimitRefusal::BelowUse));
    bench.pool.quotas.set_reservation(a, 0).unwrap();

    let c = bench.pool.clone(a2, root);
    bench.check("clone", root, [67_072_000, 964_726_784, 131_072, 131_072, 0, 66_940_928, 0]);
    bench.check("clone", a, [66_412_544, 990_941_184, 10_608_640, 10_608_640, 29_589_504, 0, 26_214_400]);
    bench.check("clone", c, [0, 964_726_784, 21_118_976, 0, 0, 0, 0]);
    // The clone rewrites 4 of the first 8 MiB of f1, which were written after a@1.
    let first = bench.pool.snapshots[&a1].point.txg;
    let second = bench.pool.snapshots[&a2].blocks.clone();
    let cloned: Vec<u32> = second.iter().filter(|(_, (birth, _))| *birth > first).map(|(block, _)| *block).collect();
    assert_eq!(cloned.len(), 64);
    bench.pool.kill(c, &cloned[..32]);
    bench.write(c, "f1", 4, 0);
    bench.write(c, "g", 6, 0);
    bench.check("clone written", c, [10_608_640, 954_081_280, 27_418_624, 10_608_640, 0, 0, 0]);
    bench.check_snapshot("clone written", a2, 8_495_104, 21_118_976);
    bench.pool.promote(c).unwrap();
    bench.pool.compare();
    bench.check("promoted", a, [36_798_464, 980_295_680, 10_608_640, 10_584_064, 0, 0, 26_214_400]);
    bench.check("promoted", c, [40_222_720, 954_081_280, 27_418_624, 27_418_624, 12_804_096, 0, 0]);
    bench.check_snapshot("promoted", a1, 8_495_104, 21_118_976);
    bench.check_snapshot("promoted", a2, 4_300_800, 21_118_976);
    assert_eq!(bench.pool.destroy_snapshot(a1), 8 * MIB);
    bench.check("c@1 destroyed", c, [31_727_616, 962_600_960, 27_418_624, 27_418_624, 4_308_992, 0, 0]);
    bench.check_snapshot("c@1 destroyed", a2, 4_308_992, 21_118_976);
    bench.pool.rollback(a);
    bench.check("rollback", a, [36_798_464, 988_803_072, 10_608_640, 10_584_064, 0, 0, 26_214_400]);

    bench.write(a, "f3", 5, 0);
    bench.check("f3", a, [36_798_464, 983_425_024, 15_859_712, 15_835_136, 90_112, 0, 20_873_216]);
    assert_eq!(judged(bench.pool.quotas.set_refquota(a, Some(12 * MIB))), Err(LimitRefusal::BelowUse));
    bench.write(a, "f4", 5, 0);
    bench.check("f4", a, [36_798_464, 978_173_952, 21_110_784, 21_086_208, 90_112, 0, 15_622_144]);
    let k = bench.pool.create(a);
    bench.write(k, "f", 7, 0);
    bench.pool.quotas.set_reservation(k, 30 * MIB).unwrap();
    bench.check("child", a, [68_255_744, 946_647_040, 21_118_976, 21_094_400, 90_112, 31_457_280, 15_613_952]);
    bench.check("child", k, [7_462_912, 955_027_456, 7_462_912, 7_462_912, 0, 0, 0]);
    assert_eq!(judged(bench.pool.quotas.set_quota(a, Some(60 * MIB))), Err(LimitRefusal::BelowUse));
    bench.write(k, "g", 60, 0);
    bench.check(
        "beyond the reservation",
        a,
        [107_249_664, 907_505_664, 21_118_976, 21_094_400, 90_112, 70_451_200, 15_613_952],
    );
    bench.pool.destroy_snapshot(a3);
    bench.check("a@3 destroyed", a, [96_665_600, 907_620_352, 21_118_976, 21_094_400, 0, 70_451_200, 5_120_000]);
    assert_eq!(judged(bench.pool.quotas.set_reservation(a, 2048 * MIB)), Err(LimitRefusal::BeyondAvailable));

    bench.pool.quotas.set_refreservation(a, 0).unwrap();
    bench.pool.quotas.set_refreservation(c, 700 * MIB).unwrap();
    bench.check("700 MiB", root, [847_572_992, 184_225_792, 131_072, 131_072, 0, 847_441_920, 0]);
    bench.check("700 MiB", c, [755_122_176, 907_620_352, 27_418_624, 27_418_624, 4_308_992, 0, 723_394_560]);
    bench.pool.snapshot(c).unwrap();
    bench.check("c@9", c, [765_730_816, 907_620_352, 27_418_624, 27_418_624, 4_308_992, 0, 734_003_200]);
    bench.write(c, "h", 20, 0);
    bench.check("c h", c, [765_730_816, 886_439_936, 48_422_912, 48_422_912, 4_399_104, 0, 712_908_800]);
    assert_eq!(judged(bench.pool.quotas.set_refreservation(c, 960 * MIB)), Err(LimitRefusal::BeyondAvailable));
    bench.pool.snapshot(c).unwrap();
    bench.check("c@10", c, [786_825_216, 886_439_936, 48_422_912, 48_422_912, 4_399_104, 0, 734_003_200]);
    bench.check("c@10", root, [879_362_048, 152_436_736, 131_072, 131_072, 0, 879_230_976, 0]);
}

#[test]
fn limits_that_meet() {
    let mut bench = Bench::new();
    let root = 1;
    let q = bench.pool.create(root);
    let quotas = &mut bench.pool.quotas;
    quotas.set_quota(q, Some(50 * MIB)).unwrap();
    assert_eq!(judged(quotas.set_reservation(q, 60 * MIB)), Err(LimitRefusal::BeyondAvailable));
    let c = bench.pool.create(q);
    let quotas = &mut bench.pool.quotas;
    assert_eq!(judged(quotas.set_reservation(c, 60 * MIB)), Err(LimitRefusal::BeyondAvailable));
    quotas.set_reservation(c, 45 * MIB).unwrap();
    assert_eq!(judged(quotas.set_quota(q, Some(40 * MIB))), Err(LimitRefusal::BelowUse));
    assert_eq!(judged(quotas.set_quota(c, Some(30 * MIB))), Err(LimitRefusal::BelowUse));
    quotas.set_refreservation(c, 46 * MIB).unwrap();
    quotas.set_refreservation(c, 20 * MIB).unwrap();
    assert_eq!(judged(quotas.set_refquota(c, Some(10 * MIB))), Err(LimitRefusal::BelowUse));
    bench.check("quotas", q, [47_308_800, 5_120_000, 122_880, 122_880, 0, 47_185_920, 0]);
    bench.check("quotas", c, [20_971_520, 52_191_232, 114_688, 114_688, 0, 0, 20_856_832]);

    let r = bench.pool.create(root);
    bench.pool.quotas.set_refreservation(r, 700 * MIB).unwrap();
    bench.write(r, "f", 100, 0);
    bench.pool.snapshot(r).unwrap();
    bench.write(r, "g", 110, 0);
    bench.pool.quotas.set_quota(r, Some(830 * MIB)).unwrap();
    assert_eq!(judged(bench.pool.quotas.take_snapshots(&[r])), Err(Shortage::Quota(r)));
    assert_eq!(bench.pool.snapshot(r), None);
    bench.pool.quotas.set_quota(r, None).unwrap();
    bench.write(r, "f", 100, 0);
    bench.write(r, "h", 50, 0);
    assert_eq!(judged(bench.pool.quotas.take_snapshots(&[r])), Err(Shortage::Pool));
}

#[test]
fn promote_and_rename_ask_the_quotas_of_who_takes_over() {
    let mut bench = Bench::new();
    let x = bench.pool.create(1);
    bench.write(x, "f", 40, 0);
    let s = bench.pool.snapshot(x).unwrap();
    let q = bench.pool.create(1);
    bench.pool.quotas.set_quota(q, Some(30 * MIB)).unwrap();
    let y = bench.pool.clone(s, q);
    assert_eq!(bench.pool.promote(y), Err(Shortage::Quota(q)));
    assert_eq!(judged(bench.pool.quotas.reparent(x, q)), Err(Shortage::Quota(q)));
    bench.check("refused", q, [122_880, 31_334_400, 122_880, 122_880, 0, 0, 0]);
    bench.check("refused", y, [0, 31_334_400, 42_106_880, 0, 0, 0, 0]);
    bench.check("refused", x, [42_106_880, 988_946_432, 42_106_880, 42_106_880, 0, 0, 0]);
    bench.pool.quotas.set_quota(q, Some(60 * MIB)).unwrap();
    bench.pool.promote(y).unwrap();
    bench.check("promoted", q, [42_229_760, 20_684_800, 122_880, 122_880, 0, 42_106_880, 0]);
    bench.check("promoted", x, [0, 988_946_432, 42_106_880, 0, 0, 0, 0]);
    bench.pool.promote(x).unwrap();
    bench.check("and back", q, [122_880, 62_791_680, 122_880, 122_880, 0, 0, 0]);
    bench.check("and back", x, [42_106_880, 988_946_432, 42_106_880, 42_106_880, 0, 0, 0]);
    bench.pool.compare();
}

#[test]
fn snapshots_in_one_txg_are_all_taken_or_none() {
    let mut bench = Bench::new();
    let x = bench.pool.create(1);
    bench.write(x, "f", 40, 0);
    let r = bench.pool.create(1);
    let s = bench.pool.create(r);
    bench.write(s, "f", 200, 0);
    bench.pool.quotas.set_refreservation(s, 850 * MIB).unwrap();
    bench.check("reserved", r, [891_412_480, 97_021_952, 122_880, 122_880, 0, 891_289_600, 0]);
    bench.check("reserved", s, [891_289_600, 778_268_672, 210_042_880, 210_042_880, 0, 0, 681_246_720]);
    assert_eq!(judged(bench.pool.quotas.take_snapshots(&[r, s])), Err(Shortage::Pool));
    bench.check("refused", s, [891_289_600, 778_268_672, 210_042_880, 210_042_880, 0, 0, 681_246_720]);
    bench.pool.quotas.set_refreservation(s, 0).unwrap();
    let first = bench.pool.snapshot(s).unwrap();
    bench.write(s, "f", 30, 100);
    let second = bench.pool.snapshot(s).unwrap();
    bench.write(s, "f", 50, 90);
    bench.check("two", r, [294_346_752, 693_878_784, 122_880, 122_880, 0, 294_223_872, 0]);
    bench.check("two", s, [294_223_872, 693_878_784, 210_042_880, 210_042_880, 84_180_992, 0, 0]);
    bench.check_snapshot("two", first, 31_596_544, 210_042_880);
    bench.check_snapshot("two", second, 31_596_544, 210_042_880);
}

#[test]
fn reservations_of_parents_serve_children() {
    let mut bench = Bench::new();
    let v = bench.pool.create(1);
    let w = bench.pool.create(v);
    let rest = bench.pool.create(1);
    bench.write(rest, "f", 881, 0);
    bench.pool.quotas.set_reservation(v, 50 * MIB).unwrap();
    bench.write(w, "f", 30, 0);
    let elsewhere = USABLE - 881 * MIB - 50 * MIB;
    bench.check("within", 1, [931 * MIB, elsewhere, 0, 0, 0, 931 * MIB, 0]);
    bench.check("within", w, [30 * MIB, elsewhere + 20 * MIB, 30 * MIB, 30 * MIB, 0, 0, 0]);
    assert_eq!(judged(bench.pool.quotas.admits(w, elsewhere + 20 * MIB, Purpose::Write)), Ok(()));
    assert_eq!(judged(bench.pool.quotas.admits(w, elsewhere + 20 * MIB + 1, Purpose::Write)), Err(Shortage::Pool));
    bench.write(w, "g", 30, 0);
    bench.check("beyond", v, [60 * MIB, elsewhere - 10 * MIB, 0, 0, 0, 60 * MIB, 0]);
    bench.pool.quotas.set_reservation(w, 75 * MIB).unwrap();
    bench.check("own", v, [75 * MIB, elsewhere - 25 * MIB, 0, 0, 0, 75 * MIB, 0]);
    bench.check("own", w, [60 * MIB, elsewhere - 10 * MIB, 60 * MIB, 60 * MIB, 0, 0, 0]);
}
