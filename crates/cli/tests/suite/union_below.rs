//! Unions with the kernel's overlayfs over them, and files of branches that are not copied or lose their names.

use crate::crashing::programs::is_there;
use crate::mounting::unions::{branches, over};
use crate::mounting::{Fixture, as_root, needs, sh};
use std::fs;

/// Changes in an overlay over `lower`, whose upper directory is in the union.
const CHANGES: &str = r"
mv file moved; mv dir/inner dir/renamed; rm gone; rm -r removed; mkdir removed; echo new > removed/new
ls -R . | sort; cat moved dir/renamed removed/new
";

#[test]
fn the_kernels_overlay_has_its_upper_directory_in_a_union() {
    needs!(as_root());
    for (words, attributes) in [("whiteout=wh", ""), ("whiteout=chardev", ""), ("whiteout=wh", ",userxattr")] {
        let mut fixture = Fixture::bare();
        let (first, second) = (fixture.directory("first"), fixture.directory("second"));
        let list = branches(&[(&first, "rw"), (&second, "rw")]);
        let at = fixture.mountpoint.clone();
        fixture.start(&["union", "-o", words], &list, &at);
        let place = fixture.scratch.path().to_owned();
        sh(
            &place,
            "mkdir -p lower/dir lower/removed shown; echo file > lower/file; echo inner > lower/dir/inner
            echo gone > lower/gone; echo below > lower/removed/below",
        );
        sh(&at, "mkdir upper work");
        let mount = format!(
            "mount -t overlay overlay -o lowerdir=lower,upperdir={0}/upper,workdir={0}/work{attributes} shown",
            at.display()
        );
        sh(&place, &mount);
        let said = sh(&place.join("shown"), CHANGES);
        sh(&place, "umount shown");
        assert!(said.ends_with("file\ninner\nnew\n") && !said.contains("below") && !said.contains("gone"), "{said}");
        // Whiteouts are devices that the union shows, and mounted again they hide the same.
        assert_eq!(sh(&at, "stat -c '%F %t %T' upper/file upper/gone upper/dir/inner").matches("character").count(), 3);
        sh(&place, &mount);
        let again = sh(&place.join("shown"), "ls -R . | sort; cat moved dir/renamed removed/new");
        sh(&place, "umount shown");
        assert_eq!(again, said, "{words}{attributes}");
    }
}

#[test]
fn a_protected_file_of_a_read_only_branch_is_not_copied() {
    needs!(as_root());
    let (fixture, upper) = over(&[], |lower| {
        fs::create_dir(lower.join("d")).unwrap();
        for name in ["immutable", "append", "plain"] {
            fs::write(lower.join("d").join(name), name).unwrap();
        }
    });
    let lower = fixture.source.clone();
    if !crate::mounting::run("chattr", ["+i".as_ref(), lower.join("d/immutable").as_os_str()]).status.success() {
        crate::mounting::skip("flags", "the file system of the tests has none");
        return;
    }
    sh(&lower, "chattr +a d/append");
    let said = sh(
        &fixture.mountpoint,
        r#"set +e
        for file in immutable append; do
          for does in "echo x | tee -a" "chmod 600" "truncate -s 0" "setfattr -n user.a -v 1" "rm -f" "mv -t ."; do
            sh -c "$does d/$file" 2>&1 | grep -o 'Operation not permitted' || echo "$does $file"
          done
        done
        cat d/immutable d/append; rm d/plain; ls d"#,
    );
    sh(&lower, "chattr -i d/immutable; chattr -a d/append");
    assert_eq!(said.matches("Operation not permitted").count(), 12, "{said}");
    assert!(said.ends_with("immutableappendappend\nimmutable\n"), "{said}");
    assert!(!upper.join("d/immutable").exists());
}

/// More names than are kept of a file come and go while it is open for writing.
#[test]
fn an_open_file_is_linked_after_it_had_many_names() {
    needs!(as_root() && is_there("python3"));
    let script = r#"
import os
os.mkdir("d")
for opened in ("first", "d/second"):
    descriptor = os.open(opened, os.O_RDWR | os.O_CREAT)
    for round in range(2):
        for number in range(20): os.link(opened, f"d/{number}")
        for number in range(20): os.unlink(f"d/{number}")
        os.link(opened, f"d/again{round}")
    os.write(descriptor, b"written")
    print(open("d/again1").read(), os.fstat(descriptor).st_nlink)
    for round in range(2): os.unlink(f"d/again{round}")
"#;
    for command in [&["union"][..], &["mirror"]] {
        let mut fixture = Fixture::bare();
        let at = fixture.mountpoint.clone();
        let source = match command {
            ["union"] => branches(&[(&fixture.source, "rw")]),
            _ => fixture.source.clone().into_os_string(),
        };
        fixture.start(command, &source, &at);
        let output =
            crate::mounting::finish(std::process::Command::new("python3").args(["-c", script]).current_dir(&at));
        let said = crate::mounting::text(&output.stdout);
        assert_eq!(said, "written 3\nwritten 3\n", "{command:?}: {}", crate::mounting::text(&output.stderr));
    }
}
