//! Parity on real mounts: every scripted call has the same result natively and through a mount.

use crate::mounting::{Fixture, as_root, images, needs};
use nacre_testkit::parity;

/// Cases that a mount with an offset cannot fulfill.
const OFFSETS: &[(&str, &str)] = &[("chown", "ids near 2^32 cannot be shown with an offset")];

/// Compares a mount with a native directory next to its source.
fn compare(fixture: &Fixture) {
    let native = fixture.directory("native");
    parity::compare(&native, &fixture.mountpoint);
}

#[test]
fn plain_mirror() {
    if as_root() {
        compare(&Fixture::mirror(&[]));
    }
}

#[test]
fn without_passthrough() {
    if as_root() {
        compare(&Fixture::mirror(crate::mounting::without_passthrough()));
    }
}

#[test]
fn each_coherence() {
    if as_root() {
        for coherence in ["exclusive", "watch", "revalidate"] {
            println!("{coherence}");
            compare(&Fixture::mirror(&[&format!("--coherence={coherence}")]));
        }
    }
}

#[test]
fn locks_forwarded() {
    if as_root() {
        compare(&Fixture::mirror(&["--enable-lock-forwarding"]));
    }
}

#[test]
fn rules_that_concern_nobody() {
    if as_root() {
        compare(&Fixture::mirror(&[
            "--map=70000/70001:@70000/@70001",
            "--hide=never-used-*",
            "--for=f:chmod-filter=a+",
        ]));
    }
}

#[test]
fn a_mirror_of_a_mirror() {
    if as_root() {
        let mut fixture = Fixture::mirror(&["--uid-offset=1000", "--gid-offset=1000"]);
        let (lower, upper) = (fixture.mountpoint.clone(), fixture.directory("upper"));
        fixture.start(&["mirror", "--uid-offset=-1000", "--gid-offset=-1000"], lower.as_ref(), &upper);
        let native = fixture.directory("native");
        parity::compare_except(&native, &upper, &[parity::UNAVOIDABLE, OFFSETS].concat());
    }
}

#[test]
fn a_union() {
    if as_root() {
        for options in [&[][..], &["--passthrough=off", "-o", "udba=reval,moveonenospc=true"]] {
            let (fixture, _) = crate::mounting::unions::over(options, |_| ());
            compare(&fixture);
        }
    }
}

/// A layer that stores attributes itself has no kernel below that would refuse invalid names.
#[test]
fn an_attribute_has_a_name_beyond_its_namespace() {
    needs!(as_root());
    for line in ["mem", "host:SOURCE"] {
        let fixture = Fixture::stack(line);
        std::fs::write(fixture.at("file"), "").unwrap();
        for name in ["user.", "trusted.", "security."] {
            let invalid = Some(rustix::io::Errno::INVAL);
            let flags = rustix::fs::XattrFlags::empty();
            assert_eq!(
                rustix::fs::setxattr(fixture.at("file"), name, b"value", flags).err(),
                invalid,
                "{name} of {line}"
            );
            assert_eq!(
                rustix::fs::getxattr(fixture.at("file"), name, &mut [0; 9][..]).err(),
                invalid,
                "{name} of {line}"
            );
            assert_eq!(rustix::fs::removexattr(fixture.at("file"), name).err(), invalid, "{name} of {line}");
        }
        assert_eq!(rustix::fs::setxattr(fixture.at("file"), "user.a", b"", rustix::fs::XattrFlags::empty()), Ok(()));
    }
}

#[test]
fn a_hundred_layers() {
    if as_root() {
        let filters = " | remap | trace | remap:uid-offset=1 | remap:uid-offset=-1".repeat(25);
        let fixture = Fixture::stack(&format!("host:SOURCE{filters}"));
        let native = fixture.directory("native");
        parity::compare(&native, &fixture.mountpoint);
    }
}

#[test]
fn other_file_systems() {
    if as_root() {
        for kind in ["ext4", "xfs", "btrfs", "tmpfs"] {
            let scratch = crate::mounting::scratch();
            let disk = scratch.path().join("disk");
            std::fs::create_dir(&disk).unwrap();
            let ready = if kind == "tmpfs" {
                crate::mounting::run("mount", ["-t", "tmpfs", "tmpfs", disk.to_str().unwrap()]).status.success()
            } else {
                images::mounted(kind, &scratch.path().join("image"), &disk)
            };
            if !ready {
                continue;
            }
            let mut fixture = Fixture::bare_in(scratch);
            let (source, native) = (disk.join("source"), disk.join("native"));
            for directory in [&source, &native] {
                std::fs::create_dir(directory).unwrap();
            }
            let mountpoint = fixture.mountpoint.clone();
            fixture.start(&["mirror"], source.as_ref(), &mountpoint);
            println!("{kind}");
            parity::compare(&native, &mountpoint);
        }
    }
}
