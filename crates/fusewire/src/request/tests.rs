//! Parsing: well-formed requests give back what was put in, everything else is refused, and nothing
//! panics.

use super::*;
use crate::abi::{self, CreateIn, ExtHeader, IoctlIn, Pod, Rename2In, Secctx, SetxattrIn, SuppGroups, WriteIn, opcode};
use crate::errno::Errno;

const FORM: Form = Form { setxattr_ext: true };

fn header(opcode: u32, total_extlen: u16) -> InHeader {
    InHeader { opcode, unique: 2, nodeid: 1, total_extlen, ..InHeader::default() }
}

fn op<'a>(opcode: u32, fixed: &'a [u8], rest: &'a [u8]) -> Result<Op<'a>, Errno> {
    parse(&header(opcode, 0), fixed, rest, FORM).map(|request| request.op)
}

#[test]
fn names_end_at_their_nul() {
    assert!(matches!(op(opcode::LOOKUP, &[], b"name\0"), Ok(Op::Lookup { name: b"name" })));
    assert!(matches!(
        op(opcode::SYMLINK, &[], b"name\0to/there\0"),
        Ok(Op::Symlink { name: b"name", target: b"to/there" })
    ));
    let rename = Rename2In { newdir: 7, flags: 2, padding: 0 };
    let parsed = op(opcode::RENAME2, rename.bytes(), b"a\0bc\0");
    assert!(matches!(parsed, Ok(Op::Rename { name: b"a", new_dir: 7, new_name: b"bc", flags: 2 })));
    for malformed in [&b"name"[..], b"", b"\0"] {
        assert!(op(opcode::LOOKUP, &[], malformed).is_err());
        assert!(op(opcode::RENAME2, rename.bytes(), malformed).is_err());
    }
    assert!(op(opcode::RENAME2, rename.bytes(), b"only\0").is_err());
    assert!(op(opcode::SYMLINK, &[], b"name\0unterminated").is_err());
    assert!(op(opcode::RENAME2, &[0; 15], b"a\0bc\0").is_err());
}

#[test]
fn data_has_the_length_that_the_request_says() {
    let write =
        WriteIn { size: 4, offset: 9, write_flags: abi::flag::WRITE_LOCKOWNER, lock_owner: 5, ..WriteIn::default() };
    let parsed = op(opcode::WRITE, write.bytes(), b"data and more");
    assert!(matches!(parsed, Ok(Op::Write { data: b"data", offset: 9, lock_owner: Some(5), .. })));
    assert!(op(opcode::WRITE, write.bytes(), b"dat").is_err());
    let value = SetxattrIn { size: 2, flags: 1, setxattr_flags: 1, padding: 0 };
    let parsed = op(opcode::SETXATTR, value.bytes(), b"user.x\0vw");
    assert!(matches!(parsed, Ok(Op::Setxattr { name: b"user.x", value: b"vw", flags: 1, setxattr_flags: 1 })));
    let short = parse(&header(opcode::SETXATTR, 0), &value.bytes()[..8], b"user.x\0vw", Form::default()).unwrap();
    assert!(matches!(short.op, Op::Setxattr { value: b"vw", flags: 1, setxattr_flags: 0, .. }));
    let ioctl = IoctlIn { in_size: u32::MAX, ..IoctlIn::default() };
    assert!(op(opcode::IOCTL, ioctl.bytes(), b"1234").is_err());
}

#[test]
fn fixed_structs_may_be_longer_than_needed() {
    // Over io_uring the struct stands in an area of 128 bytes.
    let mut area = [0_u8; 128];
    WriteIn { size: 1, ..WriteIn::default() }.write(&mut area).unwrap();
    assert!(matches!(op(opcode::WRITE, &area, b"x"), Ok(Op::Write { data: b"x", .. })));
}

#[test]
fn extensions_of_a_creation() {
    let groups = SuppGroups { nr_groups: 1 };
    let mut rest = b"name\0".to_vec();
    // 8 head + 4 count + 4 group.
    rest.extend_from_slice(ExtHeader { size: 16, r#type: abi::ext::GROUPS }.bytes());
    rest.extend_from_slice(groups.bytes());
    rest.extend_from_slice(&1234_u32.to_ne_bytes());
    // One context: 8 head + 8 + "selinux\0" (8) + 5 bytes of label + 3 of padding.
    rest.extend_from_slice(ExtHeader { size: 32, r#type: 1 }.bytes());
    rest.extend_from_slice(Secctx { size: 5, padding: 0 }.bytes());
    rest.extend_from_slice(b"selinux\0label\0\0\0");
    let create = CreateIn { mode: 0o100_644, ..CreateIn::default() };
    let request = parse(&header(opcode::CREATE, 6), create.bytes(), &rest, FORM).unwrap();
    assert!(matches!(request.op, Op::Create { name: b"name", mode: 0o100_644, .. }));
    assert_eq!(request.groups.iter().collect::<Vec<_>>(), [1234]);
    assert_eq!(request.security.iter().collect::<Vec<_>>(), [(&b"selinux"[..], &b"label"[..])]);
    // An extension area longer than the request, and one that contradicts itself.
    assert!(parse(&header(opcode::CREATE, 60), create.bytes(), &rest, FORM).is_err());
    for lie in [0, 7, 200_u32] {
        rest[5..9].copy_from_slice(&lie.to_ne_bytes());
        assert!(parse(&header(opcode::CREATE, 6), create.bytes(), &rest, FORM).is_err());
    }
}

#[test]
fn unknown_operations_are_told_apart() {
    assert!(matches!(op(99, &[], &[]), Ok(Op::Unknown(99))));
    assert!(matches!(op(opcode::SETUPMAPPING, &[], &[]), Ok(Op::Unknown(48))));
}

#[test]
fn every_operation_has_its_struct() {
    // What the device splits off must be enough for parsing, for every opcode with a reply.
    let names = b"a\0b\0";
    for opcode in 1..opcode::COUNT as u32 {
        let one_way = matches!(
            opcode,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::NOTIFY_REPLY | opcode::INIT
        );
        if opcode::name(opcode).is_none() || one_way {
            continue;
        }
        let fixed = vec![0; fixed_size(opcode, FORM)];
        assert!(op(opcode, &fixed, names).is_ok(), "{opcode}");
        if !fixed.is_empty() && opcode != opcode::SYNCFS {
            assert!(op(opcode, &fixed[1..], names).is_err(), "{opcode}");
        }
    }
}

/// A generator of pseudo-random numbers (xorshift), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        let len = self.next() % (most + 1);
        // Small numbers and NULs are what lengths and names are made of.
        (0..len)
            .map(|_| if self.next().is_multiple_of(2) { (self.next() % 20) as u8 } else { self.next() as u8 })
            .collect()
    }
}

#[test]
fn random_bytes_never_panic() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut good, mut bad) = (0_u32, 0_u32);
    for _ in 0..300_000 {
        let header = header(
            (random.next() % 60) as u32,
            if random.next().is_multiple_of(3) { (random.next() % 8) as u16 } else { 0 },
        );
        let (fixed, rest) = (random.bytes(128), random.bytes(96));
        match parse(&header, &fixed, &rest, Form { setxattr_ext: random.next().is_multiple_of(2) }) {
            Ok(request) => {
                good += 1;
                assert!(request.groups.iter().count() <= 24);
                assert!(request.security.iter().count() <= 12);
                let names = match request.op {
                    Op::Lookup { name } | Op::Unlink { name } | Op::Mkdir { name, .. } | Op::Create { name, .. } => {
                        vec![name]
                    }
                    Op::Rename { name, new_name, .. } => vec![name, new_name],
                    _ => Vec::new(),
                };
                assert!(names.iter().all(|name| !name.is_empty() && !name.contains(&0)));
            }
            Err(error) => {
                bad += 1;
                assert_eq!(error, Errno::EIO);
            }
        }
    }
    assert!(good > 10_000 && bad > 10_000, "{good} good, {bad} bad");
}
