//! The accounts behind the ledger's mutex. Pure.

use super::{Full, Limits, Owner, Refused, Sum, Sums, Totals};
use hashbrown::HashMap;

/// Bytes and files that a change adds or removes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Amount {
    pub(super) bytes: u64,
    pub(super) inodes: u64,
}

/// All accounts and their limits.
#[derive(Debug)]
pub(super) struct Books {
    limits: Limits,
    whole: Sum,
    users: HashMap<u32, Sum>,
    dirs: HashMap<usize, Sum>,
    refused: Refused,
    soft_exceeded: bool,
    clamped: u64,
}

impl Sum {
    fn add(&mut self, amount: Amount, clamped: &mut u64) {
        for (field, more) in [(&mut self.bytes, amount.bytes), (&mut self.inodes, amount.inodes)] {
            *field = field.checked_add(more).unwrap_or_else(|| {
                *clamped += 1;
                u64::MAX
            });
        }
    }

    fn take(&mut self, amount: Amount, clamped: &mut u64) {
        for (field, less) in [(&mut self.bytes, amount.bytes), (&mut self.inodes, amount.inodes)] {
            *field = field.checked_sub(less).unwrap_or_else(|| {
                *clamped += 1;
                0
            });
        }
    }

    fn is_nothing(self) -> bool {
        self == Sum::default()
    }

    fn or_more(&mut self, other: Sum) {
        self.bytes = self.bytes.max(other.bytes);
        self.inodes = self.inodes.max(other.inodes);
    }
}

/// Room below `limit` (`None`: `u64::MAX`) at this usage.
fn room(limit: Option<u64>, used: u64) -> u64 {
    limit.unwrap_or(u64::MAX).saturating_sub(used)
}

/// Whether `more` fits at this usage. Nothing always does, even above the limit.
fn fits(more: u64, limit: Option<u64>, used: u64) -> bool {
    more == 0 || more <= room(limit, used)
}

impl Books {
    pub(super) fn new(limits: Limits) -> Books {
        Books {
            limits,
            whole: Sum::default(),
            users: HashMap::new(),
            dirs: HashMap::new(),
            refused: Refused::default(),
            soft_exceeded: false,
            clamped: 0,
        }
    }

    fn user(&self, uid: u32) -> (Option<u64>, Sum) {
        (self.limits.users.get(&uid).copied(), self.users.get(&uid).copied().unwrap_or_default())
    }

    fn dir(&self, group: usize) -> (Option<u64>, Sum) {
        (self.limits.dirs.get(group).copied(), self.dirs.get(&group).copied().unwrap_or_default())
    }

    fn fits_user(&self, uid: u32, bytes: u64) -> Result<(), Full> {
        let (limit, used) = self.user(uid);
        if fits(bytes, limit, used.bytes) { Ok(()) } else { Err(Full::User) }
    }

    fn fits_dir(&self, group: Option<usize>, bytes: u64) -> Result<(), Full> {
        let Some(group) = group else { return Ok(()) };
        let (limit, used) = self.dir(group);
        if fits(bytes, limit, used.bytes) { Ok(()) } else { Err(Full::Dir) }
    }

    pub(super) fn charge(&mut self, owner: Owner, amount: Amount) -> Result<(), Full> {
        if !fits(amount.bytes, self.limits.bytes, self.whole.bytes) {
            return Err(Full::Whole);
        }
        if !fits(amount.inodes, self.limits.inodes, self.whole.inodes) {
            return Err(Full::Inodes);
        }
        self.fits_user(owner.uid, amount.bytes)?;
        self.fits_dir(owner.group, amount.bytes)?;
        self.force(owner, amount);
        Ok(())
    }

    pub(super) fn charge_up_to(&mut self, owner: Owner, bytes: u64, unit: u64) -> (u64, Option<Full>) {
        let (room, full) = self.room_of(owner);
        if bytes <= room {
            self.force(owner, Amount { bytes, inodes: 0 });
            return (bytes, None);
        }
        let some = room - room % unit;
        self.force(owner, Amount { bytes: some, inodes: 0 });
        (some, Some(full))
    }

    /// Room of an owner, and the limit that is reached first.
    pub(super) fn room_of(&self, owner: Owner) -> (u64, Full) {
        let (user_limit, user) = self.user(owner.uid);
        let mut least = (self.room(), Full::Whole);
        let of_user = room(user_limit, user.bytes);
        if of_user < least.0 {
            least = (of_user, Full::User);
        }
        if let Some(group) = owner.group {
            let (limit, used) = self.dir(group);
            let of_dir = room(limit, used.bytes);
            if of_dir < least.0 {
                least = (of_dir, Full::Dir);
            }
        }
        least
    }

    pub(super) fn room(&self) -> u64 {
        room(self.limits.bytes, self.whole.bytes)
    }

    pub(super) fn force(&mut self, owner: Owner, amount: Amount) {
        self.whole.add(amount, &mut self.clamped);
        self.add_to_user(owner.uid, amount);
        self.add_to_dir(owner.group, amount);
    }

    pub(super) fn release(&mut self, owner: Owner, amount: Amount) {
        self.whole.take(amount, &mut self.clamped);
        self.take_from_user(owner.uid, amount);
        self.take_from_dir(owner.group, amount);
    }

    pub(super) fn transfer(&mut self, from: Owner, to: Owner, amount: Amount) -> Result<(), Full> {
        if from.uid != to.uid {
            self.fits_user(to.uid, amount.bytes)?;
        }
        if from.group != to.group {
            self.fits_dir(to.group, amount.bytes)?;
        }
        self.force_transfer(from, to, amount);
        Ok(())
    }

    pub(super) fn force_transfer(&mut self, from: Owner, to: Owner, amount: Amount) {
        if from.uid != to.uid {
            self.take_from_user(from.uid, amount);
            self.add_to_user(to.uid, amount);
        }
        if from.group != to.group {
            self.take_from_dir(from.group, amount);
            self.add_to_dir(to.group, amount);
        }
    }

    fn add_to_user(&mut self, uid: u32, amount: Amount) {
        if amount.bytes | amount.inodes != 0 {
            self.users.entry(uid).or_default().add(amount, &mut self.clamped);
        }
    }

    fn add_to_dir(&mut self, group: Option<usize>, amount: Amount) {
        if let Some(group) = group.filter(|_| amount.bytes | amount.inodes != 0) {
            self.dirs.entry(group).or_default().add(amount, &mut self.clamped);
        }
    }

    fn take_from_user(&mut self, uid: u32, amount: Amount) {
        let account = self.users.entry(uid).or_default();
        account.take(amount, &mut self.clamped);
        if account.is_nothing() {
            self.users.remove(&uid);
        }
    }

    fn take_from_dir(&mut self, group: Option<usize>, amount: Amount) {
        let Some(group) = group else { return };
        let account = self.dirs.entry(group).or_default();
        account.take(amount, &mut self.clamped);
        if account.is_nothing() {
            self.dirs.remove(&group);
        }
    }

    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn refused(&mut self, full: Full) {
        let counter = match full {
            Full::Whole => &mut self.refused.bytes,
            Full::Inodes => &mut self.refused.inodes,
            Full::User => &mut self.refused.user,
            Full::Dir => &mut self.refused.dir,
        };
        *counter = counter.saturating_add(1);
    }

    /// Updates the state of the soft limit; returns whether it changed.
    pub(super) fn note_soft(&mut self) -> bool {
        let used = self.whole.bytes;
        let exceeded = match self.limits.soft {
            None => false,
            Some(soft) if self.soft_exceeded => used >= soft - soft / 20,
            Some(soft) => used >= soft,
        };
        let crossed = exceeded != self.soft_exceeded;
        self.soft_exceeded = exceeded;
        crossed
    }

    pub(super) fn soft_exceeded(&self) -> bool {
        self.soft_exceeded
    }

    pub(super) fn clamped(&self) -> u64 {
        self.clamped
    }

    pub(super) fn sums(&self) -> Sums {
        Sums {
            whole: self.whole,
            users: self.users.iter().map(|(&uid, &sum)| (uid, sum)).collect(),
            dirs: self.dirs.iter().map(|(&group, &sum)| (group, sum)).collect(),
        }
    }

    pub(super) fn totals(&self) -> Totals {
        Totals {
            sums: self.sums(),
            limits: self.limits.clone(),
            refused: self.refused,
            soft_exceeded: self.soft_exceeded,
            clamped: self.clamped,
        }
    }

    pub(super) fn replace(&mut self, sums: &Sums) {
        self.whole = sums.whole;
        self.users = sums.users.iter().map(|(&uid, &sum)| (uid, sum)).filter(|(_, sum)| !sum.is_nothing()).collect();
        self.dirs = sums.dirs.iter().map(|(&group, &sum)| (group, sum)).filter(|(_, sum)| !sum.is_nothing()).collect();
    }

    /// Raises all accounts to at least `sums`. Every file has an owner, so the whole is the sum
    /// over the users: raised one by one, the users may hold more together than either whole.
    pub(super) fn raise(&mut self, sums: &Sums) {
        for (&uid, &sum) in sums.users.iter().filter(|(_, sum)| !sum.is_nothing()) {
            self.users.entry(uid).or_default().or_more(sum);
        }
        for (&group, &sum) in sums.dirs.iter().filter(|(_, sum)| !sum.is_nothing()) {
            self.dirs.entry(group).or_default().or_more(sum);
        }
        let mut together = Sum::default();
        for sum in self.users.values() {
            together.add(Amount { bytes: sum.bytes, inodes: sum.inodes }, &mut self.clamped);
        }
        self.whole.or_more(sums.whole);
        self.whole.or_more(together);
    }
}
